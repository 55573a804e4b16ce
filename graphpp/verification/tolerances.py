"""The tolerance of each result of a step, and the comparison of two runs within these tolerances.

- `rounding` measures the effect of rounding on this step: every value of the uncut graph is moved by one unit in the last place
  at random. A result's tolerance is ten times its resulting relative distance (`report.py`).
- Rounding also changes decisions, such as a ReLU's sign or a token's expert. One changed decision moves gradients by up to some
  percent, and few runs meet it. A differing result is therefore compared with further jittered runs of the uncut graph, until
  it is within its tolerance of one. A real fault is far from all of them, unless the result has few elements.
- A sum of n terms in another order is off by up to sqrt(n) roundings (Higham and Mary 2019) of the kernel's accumulation dtype,
  float32 for narrower dtypes. `growth_of_sums` is the factor by which this exceeds the ten.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.verification.report import Comparison, Difference, difference, loss_name, widened
from graphpp.verification.runs import Jitter, Numbers, Step, run_uncut

_JITTERS = 3  # runs that measure rounding; the median ignores one run with a changed decision
_DECISIONS = 16  # further runs, at most, for results that differ; a ResNet needs 3 on average
_OF_DECISIONS = 2  # units in the last place by which these runs are moved, as Inductor's results are
_OF_JITTER = 10  # tolerance / measured rounding; Inductor's differences are 0.3 to 2 times the measured rounding
_FLOAT32_TOLERANCE = 1e-6
_FLOAT32_EPS = torch.finfo(torch.float32).eps
_MOST = 0.5  # the largest tolerance: a result that is off by half is wrong in any case


@dataclass(frozen=True)
class Tolerances:
    """Relative differences that count as rounding: `named` by names of a `Comparison`, `others` for all other results.

    `note`: why close results are not equal. `decisions`: lazily made runs of the reference with other rounding, with which
    differing results are compared too.
    """

    others: float
    named: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    decisions: Iterator[Numbers] = iter(())

    def of(self, name: str) -> float:
        return self.named.get(name, self.others)


def compared(title: str, ours: Numbers, theirs: Numbers, tolerances: Tolerances) -> Comparison:
    """Compare `ours` with the reference `theirs` within tolerances; then differing values with `decisions`."""
    first = found = _compared(title, ours, theirs, tolerances)
    if found.verdict == "equal":
        return found
    while _may_be_decisions(found) and (other := next(tolerances.decisions, None)) is not None:
        found = found.excused_by(_compared(title, ours, other, tolerances))
    if found.verdict == "not finite":
        return replace(found, note=_NOT_FINITE)
    excused = sum(a is not b for (_, a), (_, b) in zip(first.all(), found.all(), strict=True))
    return replace(found, note=tolerances.note + (_DECIDED.format(excused) if excused else ""))


_NOT_FINITE = (
    "Losses or gradients are NaN or infinite in both runs, so equal bits show nothing. Give data and parameters with which "
    "those of eager are finite."
)
_DECIDED = (
    "; {} results belong to other decisions, such as a ReLU's about an element near zero: they are those of the uncut graph, "
    "rounded otherwise"
)


def _may_be_decisions(found: Comparison) -> bool:
    """Whether results differ, and none by more than other decisions could explain."""
    wrong = [each.relative for _, each in found.all() if each.verdict == "differs"]
    return bool(wrong) and all(size <= _MOST for size in wrong)


def _compared(title: str, ours: Numbers, theirs: Numbers, tolerances: Tolerances) -> Comparison:
    squares = [(widened(gradient).norm().item() ** 2, gradient.numel()) for gradient in theirs.grads.values()]
    average = (sum(size for size, _ in squares) / max(1, sum(count for _, count in squares))) ** 0.5  # root mean square
    losses = tuple(
        _of_result(a, b, tolerances.of(loss_name(index, len(ours.losses))))
        for index, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))
    )
    gradients: dict[str, Difference] = {}
    for fqn in dict.fromkeys([*theirs.grads, *ours.grads]):
        left, right = ours.grads.get(fqn), theirs.grads.get(fqn)
        if left is None or right is None:
            gradients[fqn] = Difference(math.inf, math.inf, "differs")  # a gradient of zeros is not the same as none
            continue
        floor = average / 1000 * right.numel() ** 0.5
        gradients[fqn] = _of_result(left, right, tolerances.of(f"gradient of {fqn}"), floor)
    buffers = {
        fqn: difference(value, theirs.buffers[fqn], tolerances.of(f"buffer {fqn}")) for fqn, value in ours.buffers.items()
    }
    return Comparison(title, losses, gradients, buffers)


def _of_result(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, floor: float = 0.0) -> Difference:
    found = difference(ours, theirs, tolerance, floor)
    return found if found.verdict == "differs" or theirs.isfinite().all() else replace(found, verdict="not finite")


def usual_tolerance(joint: JointGraph) -> float:
    """1e-6 in float32; in the coarsest floating dtype of the graph, equally many units in the last place."""
    return _FLOAT32_TOLERANCE * _coarsest(joint) / _FLOAT32_EPS


def growth_of_sums(joint: JointGraph, terms: int) -> float:
    """The factor by which a tolerance grows for sums of `terms` terms in another order."""
    return max(1.0, math.sqrt(terms) * min(1.0, _FLOAT32_EPS / (_coarsest(joint) or 1.0)) / _OF_JITTER)


def _coarsest(joint: JointGraph) -> float:
    values = [node.meta["val"] for node in joint.computed() if isinstance(node.meta["val"], torch.Tensor)]
    return max((torch.finfo(value.dtype).eps for value in values if value.is_floating_point()), default=0.0)


def rounding(step: Step, joint: JointGraph, uncut: Numbers, tolerance: float, note: str, growth: float = 1.0) -> Tolerances:
    """Tolerances for results with other summation orders: `growth` times the effect of rounding, or times `tolerance`."""
    noise = _noise(step, joint, uncut)
    named = {name: min(growth * max(tolerance, _OF_JITTER * moved), _MOST) for name, moved in noise.items()}
    most = max(noise, key=lambda name: noise[name])
    words = f"{note}, and rounding alone moves the {most} by {noise[most]:.1e}"
    decisions = (_moved(step, joint, Jitter(_JITTERS + run, _OF_DECISIONS)) for run in range(_DECISIONS))
    return Tolerances(tolerance, named, words, decisions)


def _noise(step: Step, joint: JointGraph, uncut: Numbers) -> dict[str, float]:
    """By result name: the median relative distance by which jitter moves it."""
    runs = (_compared("", _moved(step, joint, Jitter(seed)), uncut, Tolerances(0.0)) for seed in range(_JITTERS))
    sizes = [{name: each.relative for name, each in run.all()} for run in runs]
    return {name: statistics.median(each[name] for each in sizes) for name in sizes[0]}


def _moved(step: Step, joint: JointGraph, jitter: Jitter) -> Numbers:
    with step.restored():
        return run_uncut(step, joint, jitter=jitter)
