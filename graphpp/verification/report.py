"""The result of `graphpp.verify`, as data and as text. It contains no tensors.

- A `Difference` is "equal" (every bit, NaN equal to NaN), "close" (relative size within the tolerance) or "differs". A loss or
  gradient with NaN or infinite elements that would be equal or close is "not finite": such a comparison shows nothing.
- The relative size is the norm of the difference divided by the norm of the reference. For a gradient the divisor is at least
  1/1000 of an average gradient's norm at that size: a gradient that is zero up to rounding (an attention key's bias) has no
  significant digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch

from graphpp.errors import GraphPPError
from graphpp.planner.plan import Plan

Verdict = Literal["equal", "close", "not finite", "differs"]
_ORDER: tuple[Verdict, ...] = ("equal", "close", "not finite", "differs")
_SHOWN = 8  # losses, gradients and buffers, each


@dataclass(frozen=True)
class Difference:
    """The distance of two tensors: `largest` absolute difference of two elements, and `relative` size."""

    largest: float = 0.0
    relative: float = 0.0
    verdict: Verdict = "equal"

    def __str__(self) -> str:
        sizes = "" if self.verdict in ("equal", "not finite") else f": {self.largest:.2e}, relative {self.relative:.2e}"
        return f"{self.verdict}{sizes}"


@dataclass(frozen=True)
class FirstDifference:
    """The first value in which two runs differ.

    `what`: the value in words; `value`: its name in the joint graph; `fqn`: the module call, "" outside of all modules;
    `source`: the user's `file:line`; `stage`, `microbatch`: None if unknown.
    """

    what: str
    fqn: str
    source: str
    difference: Difference
    value: str = ""
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        place = f"{self.fqn or 'outside of all modules'}{f' ({self.source})' if self.source else ''}"
        words = [self.what, f"in {place}"]
        words += [f"stage {self.stage}"] * (self.stage is not None)
        words += [f"microbatch {self.microbatch}"] * (self.microbatch is not None)
        return ", ".join([*words, str(self.difference)])


@dataclass(frozen=True)
class Comparison:
    """One run compared with another: losses per microbatch or of the whole batch; gradients and buffers by FQN.

    `first`: the first value that differs. `note`: why the runs were not compared, or why a tolerance is wider. `compared`:
    False if the runs could not be compared.
    """

    title: str
    losses: tuple[Difference, ...] = ()
    largest: Mapping[str, Difference] = field(default_factory=dict)
    buffers: Mapping[str, Difference] = field(default_factory=dict)
    first: FirstDifference | None = None
    note: str = ""
    compared: bool = True

    @property
    def verdict(self) -> Verdict:
        return max((each.verdict for _, each in self.all()), key=_ORDER.index, default="equal")

    @property
    def ok(self) -> bool:
        return self.verdict in ("equal", "close")

    def all(self) -> Iterator[tuple[str, Difference]]:
        """(name of the loss, gradient or buffer, difference) of every compared value, equal ones included."""
        yield from chain(*self._kinds())

    def excused_by(self, other: Comparison) -> Comparison:
        """This comparison, in which a differing value counts as close unless it differs in `other` too."""
        return replace(
            self,
            losses=tuple(_better(*pair) for pair in zip(self.losses, other.losses, strict=True)),
            largest={fqn: _better(each, other.largest[fqn]) for fqn, each in self.largest.items()},
            buffers={fqn: _better(each, other.buffers[fqn]) for fqn, each in self.buffers.items()},
        )

    def _kinds(self) -> Iterator[list[tuple[str, Difference]]]:
        yield [(loss_name(index, len(self.losses)), each) for index, each in enumerate(self.losses)]
        yield [(f"gradient of {fqn}", each) for fqn, each in self.largest.items()]
        yield [(f"buffer {fqn}", each) for fqn, each in self.buffers.items()]

    def __str__(self) -> str:
        if not self.compared:
            return f"{self.title}: NOT COMPARED. {self.note}"
        counts = f"{len(self.losses)} losses, {len(self.largest)} gradients, {len(self.buffers)} buffers"
        lines = [f"{self.title}: {_SAID[self.verdict]} ({counts})"]
        lines += [f"  {self.note}"] * bool(self.note)
        lines += [f"  first part at {self.first}"] * (self.first is not None)
        return "\n".join([*lines, *self._table()])

    def _table(self) -> Iterator[str]:
        for kind in self._kinds():
            unequal = [(name, each) for name, each in kind if each.verdict != "equal"]
            unequal.sort(key=lambda pair: (-_ORDER.index(pair[1].verdict), -pair[1].relative))
            yield from (f"  {name}: {each}" for name, each in unequal[:_SHOWN])
            if len(unequal) > _SHOWN:
                yield f"  and {len(unequal) - _SHOWN} more, none worse"


def _better(found: Difference, other: Difference) -> Difference:
    return replace(found, verdict="close") if other.verdict != "differs" == found.verdict else found


def loss_name(microbatch: int, losses: int) -> str:
    return "loss" if losses == 1 else f"loss of microbatch {microbatch}"


_SAID: dict[Verdict, str] = {
    "equal": "equal, every bit", "close": "close, within rounding", "not finite": "NOT FINITE", "differs": "THEY DIFFER",
}  # fmt: skip


@dataclass(frozen=True)
class Verification:
    """The result of `graphpp.verify`.

    `cut`: stage programs compared with the uncut joint graph. `eager`: the joint graph compared with eager. `whole_batch`: with
    `against="whole batch"`, eager over microbatches compared with eager over the whole batch. `tolerance`: the relative
    difference that counts as rounding. `seconds`: duration of the verification.
    """

    cut: Comparison
    eager: Comparison
    plan: Plan
    tolerance: float
    seconds: float
    whole_batch: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether no compared value differs by more than its tolerance, and all losses and gradients are finite."""
        return all(each.ok for each in self._comparisons)

    @property
    def _comparisons(self) -> list[Comparison]:
        return [each for each in (self.cut, self.eager, self.whole_batch) if each is not None]

    def raise_if_wrong(self) -> None:
        """Raise `GraphPPError` with the whole report unless `ok`."""
        if not self.ok:
            raise GraphPPError(str(self))

    def __str__(self) -> str:
        name, ranks = self.plan.schedule.name, self.plan.schedule.ranks
        checked = f"schedule {name}: complete, in order, cannot deadlock on {ranks} rank{'s' * (ranks > 1)}"
        return "\n".join([str(self.plan), "", checked, *map(str, self._comparisons), "", self._last_line()])

    def _last_line(self) -> str:
        if "not finite" in (self.cut.verdict, self.eager.verdict):
            said = "NOTHING IS SHOWN, for losses or gradients are NaN or infinite"
        elif not (self.cut.ok and self.eager.ok):
            said = "WRONG, do not train with this pipeline"
        elif not self.ok:
            said = "NOT THE WHOLE BATCH, though equal to a loop over the microbatches"
        else:
            said = "ok" if all(each.compared for each in self._comparisons) else "ok as far as it was compared"
        return f"{said}: tolerance {self.tolerance:.1e}, {self.seconds:.1f} s"


def difference(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, floor: float = 0.0) -> Difference:
    """The distance of `ours` from the reference `theirs`; the relative size's divisor is at least `floor`."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Difference(float("inf"), float("inf"), "differs")
    if same(ours, theirs):
        return Difference()
    left, right = widened(ours), widened(theirs)
    gap = (left - right).masked_fill((left == right) | (left.isnan() & right.isnan()), 0)
    largest, size = gap.abs().max().item(), max(right.norm().item(), floor)
    relative = gap.norm().item() / size if size else float("inf")
    return Difference(largest, relative, "close" if relative <= tolerance else "differs")


def widened(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors have equal shape, dtype and elements, NaN equal to NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if torch.equal(ours, theirs):
        return True
    wide = ours.is_floating_point() or ours.is_complex()
    return wide and bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())
