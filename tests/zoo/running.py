"""One model of the zoo on two ranks: eager, uncut, and under every cut, in one call of `run_ranks`.

Contract: `visit` compares nothing; it returns the numbers of two steps (no optimizer between them, so that a difference
is not amplified) on different batches. `uncut` is `split=1` in a group of one rank. `error` measures a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import graphpp
from tests import internals
from tests.distributed import run_ranks
from tests.models import Batch
from tests.reference import eager_steps
from tests.training import joined, local_grads, unequal, unequal_lists
from tests.zoo.models import ZOO, Entry

MICROBATCHES = 4
STEPS = 2
RANKS = 2
TOLERANCE = 1e-6  # relative, in the 2-norm, per gradient


@dataclass(frozen=True)
class Run:
    """What the steps gave, by step and FQN."""

    name: str  # of the cut
    schedule: str = ""
    stages: int = 1
    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    crossing: tuple[tuple[int, int], ...] = ()  # bytes per microbatch over each boundary, forward and backward
    shared: frozenset[str] = frozenset()  # parameters to whose gradients several stages contribute

    def join(self, other: Run) -> Run:
        """Both ranks' parts as one."""
        assert unequal_lists(self.losses, other.losses) == []
        grads = [joined(pair) for pair in zip(self.grads, other.grads, strict=True)]
        buffers = joined([self.buffers, other.buffers])
        return Run(self.name, self.schedule, self.stages, self.losses, grads, buffers, self.crossing, self.shared)


@dataclass(frozen=True)
class Visit:
    """All runs of one model."""

    eager: Run
    uncut: Run
    cut: list[Run]


def run_model(name: str, dropout: float = 0.0) -> Visit:
    """Run a model of the zoo on two ranks."""
    (uncut, first), (plain, second) = run_ranks(visit, RANKS, name, dropout)
    return Visit(plain, uncut, [one.join(other) for one, other in zip(first, second, strict=True)])


def visit(rank: int, name: str, dropout: float) -> tuple[Run, list[Run]]:
    """The uncut run on rank 0 or the eager one on rank 1, and this rank's part of the cut ones."""
    entry = ZOO[name]
    numbered: list[tuple[str, int | Sequence[str]]] = [("split=2", 2), ("split=4", 4)]
    cuts = numbered + [(", ".join(cut), cut) for cut in entry.cuts]
    with one_capture():
        group = dist.new_group([rank], use_local_synchronization=True)  # on both, for torch counts groups
        alone = trained(entry, Run("uncut", "loop"), 1, dropout, group) if rank == 0 else eager(entry)
        return alone, [trained(entry, plan(*cut), cut[1], dropout) for cut in cuts]


@contextmanager
def one_capture() -> Iterator[None]:
    """A captured graph knows no cut, and takes longest to make: each pipeline lowers a copy of the first one's."""
    kept = []

    def once(*args: Any, **options: Any) -> Any:
        if not kept:
            kept.append(internals.capture(*args, **options))
        return deepcopy(kept[0])

    with internals.capturing_by(once):
        yield


def plan(name: str, split: int | Sequence[str]) -> Run:
    """Two stages run under 1F1B, four under Interleaved1F1B: one and two on each rank."""
    stages = split if isinstance(split, int) else len(split) + 1
    return Run(name, {2: "1F1B", 4: "Interleaved1F1B"}[stages], stages)


def eager(entry: Entry) -> Run:
    """The plain loop."""
    batches = [entry.batch(seed) for seed in range(STEPS)]
    found = eager_steps(entry.model(), entry.loss, batches, MICROBATCHES, STEPS, optimizer=None)
    return Run("eager", "loop", 0, found.losses, found.grads, found.buffers)


def trained(
    entry: Entry, run: Run, split: int | Sequence[str], dropout: float, group: dist.ProcessGroup | None = None
) -> Run:
    """The steps through graphpp, on this rank."""
    pipe = graphpp.compile(
        entry.model(dropout), entry.loss, example=example(entry.batch(0)), split=split, microbatches=MICROBATCHES,
        schedule="auto" if group else run.schedule, mesh=group,
    )  # fmt: skip
    torch.manual_seed(0)
    for seed in range(STEPS):
        for parameter in pipe.parameters():
            parameter.grad = None
        batch = entry.batch(seed)
        run.losses.append(pipe.step(*batch.args, target=batch.target, **batch.kwargs).losses)
        run.grads.append(local_grads(pipe))
    run.buffers.update(pipe.named_buffers())
    return described(run, pipe)


def described(run: Run, pipe: graphpp.Pipeline) -> Run:
    """The run with what the compiled program tells of its boundaries."""
    plans = pipe.plan.stages
    crossing = tuple((below.sent_forward_bytes, above.sent_backward_bytes) for below, above in pairwise(plans))
    made = [fqn for plan in plans for fqn in pipe.programs(plan.stage).gradients]
    shared = frozenset(fqn for fqn in made if made.count(fqn) > 1)
    return Run(run.name, run.schedule, run.stages, run.losses, run.grads, run.buffers, crossing, shared)  # type: ignore[arg-type]


def example(batch: Batch) -> graphpp.Microbatch:
    return graphpp.Microbatch(*batch.microbatches(MICROBATCHES)[0])


def different(one: Run, other: Run) -> list[str]:
    """What is not bit-equal: the losses, gradients by FQN, buffers by FQN."""
    grads = {fqn for mine, theirs in zip(one.grads, other.grads, strict=True) for fqn in unequal(mine, theirs)}
    losses = ["losses" for _ in unequal_lists(one.losses, other.losses)]
    return [*losses, *sorted(grads), *(f"buffer {fqn}" for fqn in unequal(one.buffers, other.buffers))]


def error(one: Run, other: Run) -> float:
    """The largest relative error of a loss or a gradient; infinite where only one has a gradient."""
    losses = [_error(*pair) for pair in zip(one.losses, other.losses, strict=True)]
    grads = [_largest(*pair) for pair in zip(one.grads, other.grads, strict=True)]
    return max(losses + grads)


def _largest(mine: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> float:
    return max(_error(mine.get(fqn), theirs.get(fqn)) for fqn in mine.keys() | theirs.keys())


def _error(mine: Tensor | None, theirs: Tensor | None) -> float:
    if mine is None or theirs is None:
        return 0.0 if mine is theirs else float("inf")
    if torch.equal(mine, theirs):
        return 0.0
    found = ((mine - theirs).norm() / theirs.norm()).item()
    return float("inf") if found != found else found
