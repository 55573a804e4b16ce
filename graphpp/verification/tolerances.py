"""How far two runs of a step may lie apart, and how far they do.

Contract
--------
- A difference is relative: the norm of the gap by the norm of the reference, for a gradient by a thousandth of what a gradient
  of average elements would have at least (that of a bias before a norm is rounding alone).
- `rounding` measures what rounding does to this step: each result's tolerance is a few times what moves it when one unit in
  the last place is added to or taken from every value of the uncut graph, by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.model_state import state_restored
from graphpp.verification.report import Comparison, Difference, difference, widened
from graphpp.verification.runs import Numbers, Step, run_uncut

_JITTERS = 2  # runs with jitter, of which the largest difference counts
_OF_JITTER = 10  # as many times that difference is still rounding; Inductor's is 0.3 to 2 times it in the zoo
_MOST = 0.5  # a result that is off by half is wrong, whatever rounding does


@dataclass(frozen=True)
class Tolerances:
    """By how much, relative, losses, gradients and buffers may differ: by their names in a `Comparison`, and all others.

    `note` says why results that are close are not equal.
    """

    others: float
    named: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def of(self, name: str) -> float:
        return self.named.get(name, self.others)


def compared(title: str, ours: Numbers, theirs: Numbers, tolerances: Tolerances) -> Comparison:
    """Ours against the reference; each value within its tolerance."""
    per_element = _average(theirs.grads.values()) / 1000
    losses = tuple(
        difference(a, b, tolerances.of(f"loss of microbatch {index}"))
        for index, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
    )
    gradients: dict[str, Difference] = {}
    for fqn in dict.fromkeys([*theirs.grads, *ours.grads]):
        left, right = ours.grads.get(fqn), theirs.grads.get(fqn)
        if left is None or right is None:
            gradients[fqn] = Difference(math.inf, math.inf, "differs")  # a gradient of zeros is not the same as none
            continue
        floor = per_element * right.numel() ** 0.5
        gradients[fqn] = difference(left, right, tolerances.of(f"gradient of {fqn}"), floor)
    buffers = {
        fqn: difference(value, theirs.buffers[fqn], tolerances.of(f"buffer {fqn}")) for fqn, value in ours.buffers.items()
    }
    return Comparison(title, losses, gradients, buffers)


def _average(gradients: Any) -> float:
    """The root mean square of all elements."""
    squares = [(widened(gradient).norm().item() ** 2, gradient.numel()) for gradient in gradients]
    return float((sum(size for size, _ in squares) / max(1, sum(count for _, count in squares))) ** 0.5)


def rounding(step: Step, joint: JointGraph, uncut: Numbers, tolerance: float, note: str) -> Tolerances:
    """Tolerances for results that are summed in other orders: at least `tolerance`, else what rounding does to them."""
    noise = _noise(step, joint, uncut)
    named = {name: max(tolerance, min(_OF_JITTER * moved, _MOST)) for name, moved in noise.items()}
    most = max(noise, key=lambda name: noise[name])
    return Tolerances(tolerance, named, f"{note}, and rounding alone moves the {most} by {noise[most]:.1e}")


def _noise(step: Step, joint: JointGraph, uncut: Numbers) -> dict[str, float]:
    """How far each result of a step moves if every value on the way is rounded otherwise, relative; by name."""
    noise: dict[str, float] = {}
    for seed in range(_JITTERS):
        with state_restored(step.model, step.device):
            moved = run_uncut(step, joint, jitter=torch.Generator().manual_seed(seed))
        for name, each in compared("", moved, uncut, Tolerances(0.0)).all():
            noise[name] = max(noise.get(name, 0.0), each.relative)
    return noise
