"""How far the loss and gradients of one step are from those of another.

Contract: errors are relative. Of a loss: to its size. Of a gradient: the 2-norm of the difference to the 2-norm of the
gradient, but at least to FLOOR times what a gradient of its number of elements has on average in the model: some are 0
but for rounding (that of a key's bias), and have no digits to compare. Infinite where only one side has a gradient, or a
number is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

FLOOR = 1e-3


@dataclass(frozen=True)
class Numbers:
    """Of one step: the loss of each microbatch, the gradients by name; None: the parameter has none."""

    losses: Tensor
    gradients: dict[str, Tensor | None]


@dataclass(frozen=True)
class Errors:
    """Relative errors of one way against eager."""

    loss: float
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> str:
        """The gradient with the largest one."""
        return max(self.gradients, key=self.gradients.__getitem__, default="")

    @property
    def gradient(self) -> float:
        return self.gradients.get(self.worst, 0.0)


def against(eager: Numbers, other: Numbers) -> Errors:
    """Relative errors; infinite where only one has a gradient, or a number is none."""
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
