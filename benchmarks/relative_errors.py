"""Relative errors of the loss and gradients of one step against those of another.

Contract: a loss's error is relative to the loss. A gradient's error is the 2-norm of the difference relative to the 2-norm of
the gradient, or to FLOOR times the average norm of a gradient of that many elements in the model if that is more: some
gradients are rounding noise around 0 (that of a key's bias), and have no digits to compare. An error is infinite where only one
side has a gradient, or a number is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

FLOOR = 1e-3


@dataclass(frozen=True)
class Numbers:
    """The loss of each microbatch of one step, and the gradients by name; None: the parameter has no gradient."""

    losses: Tensor
    gradients: dict[str, Tensor | None]


@dataclass(frozen=True)
class Errors:
    """Relative errors of one step against the eager step."""

    loss: float
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> str:
        """The name of the gradient with the largest error."""
        return max(self.gradients, key=self.gradients.__getitem__, default="")

    @property
    def gradient(self) -> float:
        return self.gradients.get(self.worst, 0.0)


def against(eager: Numbers, other: Numbers) -> Errors:
    """Relative errors of `other`; infinite where only one side has a gradient, or a number is NaN."""
    made = [gradient for gradient in eager.gradients.values() if gradient is not None]
    usual = sum(float(each.double().square().sum()) for each in made) / sum(each.numel() for each in made)
    names = eager.gradients.keys() | other.gradients.keys()
    found = {name: apart(eager.gradients.get(name), other.gradients.get(name), usual) for name in sorted(names)}
    losses = (other.losses - eager.losses).abs() / eager.losses.abs()
    return Errors(finite(losses.max().item()), found)


def apart(wanted: Tensor | None, found: Tensor | None, usual: float) -> float:
    """The relative error of a gradient; `usual`: the mean square of an element of the model's gradients."""
    if wanted is None or found is None:
        return 0.0 if wanted is found else math.inf
    size = max(float(wanted.double().norm()), FLOOR * math.sqrt(usual * wanted.numel()))
    difference = float((found.double() - wanted.double()).norm())
    return finite(difference / size) if difference else 0.0


def finite(value: float) -> float:
    return math.inf if math.isnan(value) else value
