"""Runs a combination on its ranks, compares with one process, and says what became of it.

Contract: `outcome` is `right`, `refused` (a `GraphPPError` on every rank), `wrong` (other numbers, or ranks that disagree on
whether the combination is refused), `raw` (another exception) or `hang` (a rank that had not ended after `PATIENCE` seconds).
Numbers are bit-equal; within `ROUNDING` where `rounds` says that the documentation promises no bits. All ranks have equal
arguments, so a `MismatchError` is `wrong`, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import graphpp
from graphpp import attention
from graphpp.errors import GraphPPError
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import WorkerLate, rank_outcomes
from tests.fuzz.combinations import OWN, Combination, Layout, consistent, smaller
from tests.fuzz.layers import ROUNDED, TIED
from tests.fuzz.one_process import Numbers, Tensors, batch, cut, loss_of, model, sgd, train_alone, weights_of
from tests.training import Captures, capturing_once

PATIENCE, ROUNDING = 180.0, 5e-5
GROUPS = {"memory": graphpp.Memory, "gradients": graphpp.Gradients, "parallel": graphpp.Parallel, "debug": graphpp.Debug}
_captures: Captures = {}


@dataclass
class Ran:
    """What one rank has. `refused`: the text of the error."""

    steps: list[Numbers] = field(default_factory=list)
    params: Tensors = field(default_factory=dict)
    refused: str = ""


class Report(NamedTuple):
    outcome: str
    text: str = ""


def sharing(case: Combination) -> AbstractContextManager[None]:
    """Equal models share a captured graph in a process, unless the graph names groups of ranks."""
    return nullcontext() if case.kind in OWN else capturing_once(_captures)


def on_rank(rank: int, case: Combination, folder: str) -> Ran:
    """Both steps on this rank."""
    torch.set_num_threads(1)
    try:
        with sharing(case):
            return _both_steps(rank, case, folder)
    except GraphPPError as error:
        return Ran(refused=f"{type(error).__name__}: {error}")


def _both_steps(rank: int, case: Combination, folder: str) -> Ran:
    here = OnRank(rank, case, case.layout)
    found = Ran([here.step(0)])
    if case.later is None:
        here.between()
    else:
        here.update()
        here.pipe.checkpoint(here.optimizer).save(folder)
        here = OnRank(rank, case, case.later)
        if not case.example:
            here.step(0)  # the parameters of a rank are known once the model is captured
        here.pipe.checkpoint(here.optimizer).load(folder)
        here.pipe.zero_grad()
    found.steps.append(here.step(1))
    here.optimizer.step()
    found.params = {fqn: whole_tensor(each.detach()).clone() for fqn, each in here.pipe.named_parameters()}
    if "gather" in case.between:
        whole = here.pipe.gather(rank=None)
        assert all(torch.equal(whole[fqn], each) for fqn, each in found.params.items()), "gather has other values"
    return found


class OnRank:
    """A pipeline of a case in a layout, with an optimizer that is made when its parameters are known."""

    def __init__(self, rank: int, case: Combination, layout: Layout) -> None:
        self.case = case
        self.mesh = layout.as_mesh.made() if layout.mesh else None
        self.replica = layout.as_mesh.replica(rank) // layout.size("cp")
        self.spread = bool({"tp", "ep", "cp"} & set(layout.as_mesh.names))
        made, example = model(case, self.mesh if self.spread else None), None
        if case.example and case.microbatches:
            example = cut(self.batch(0), case.microbatches)[0]
        options = compile_options(case, layout)
        self.pipe = graphpp.compile(made, loss_of(case), mesh=self.mesh, example=example, **options)
        self._optimizer: torch.optim.Optimizer | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        self._optimizer = self._optimizer or sgd(self.pipe.parameters())
        return self._optimizer

    def batch(self, number: int) -> graphpp.Microbatch:
        """This rank's batch: under `cp` its part of each sequence."""
        whole = batch(self.case, number, self.replica)
        if self.case.kind != "long" or not self.spread:
            return whole
        assert self.mesh is not None
        group, balanced = self.mesh.get_group("cp"), self.case.variant == "balanced"
        tokens, target = (attention.sequence_part(each, group, balanced=balanced) for each in (whole.args[0], whole.target))
        positions = attention.sequence_positions(tokens.shape[1], group, balanced=balanced)
        return graphpp.Microbatch((tokens, graphpp.whole(positions)), {}, target)

    def step(self, number: int) -> Numbers:
        case, whole = self.case, self.batch(number)
        torch.manual_seed(100 + number)
        if case.given == "microbatches" and case.microbatches:
            result = self.pipe.step_microbatches(cut(whole, case.microbatches), **weights_of(case))
        else:
            result = self.pipe.step(*whole.args, target=whole.target, **weights_of(case), **whole.kwargs)
        named = [(fqn, each.grad) for fqn, each in self.pipe.named_parameters() if each.grad is not None]
        grads = {fqn: whole_tensor(grad).clone() for fqn, grad in named}
        buffers = {fqn: buffer.clone() for fqn, buffer in self.pipe.named_buffers()}
        return Numbers(list(result.losses.unbind()), grads, buffers, self.evaluated() if number == 0 else [])

    def evaluated(self) -> list[Tensor]:
        whole = self.batch(0)
        if "eval" not in self.case.between:
            return []
        losses = self.pipe.eval(*whole.args, target=whole.target, **whole.kwargs).losses
        return [] if losses is None else list(losses.unbind())

    def between(self) -> None:
        if "clip" in self.case.between:
            self.pipe.clip_grad_norm_(0.1)
        if "recapture" in self.case.between:
            self.pipe.recapture()
        if "optimizer" in self.case.between:
            self.update()
        elif "keep" not in self.case.between:
            self.pipe.zero_grad()

    def update(self) -> None:
        self.optimizer.step()
        self.pipe.zero_grad()


def compile_options(case: Combination, layout: Layout) -> dict[str, Any]:
    """The keywords of `graphpp.compile` but mesh and example."""
    found: dict[str, Any] = {"microbatches": case.microbatches, "backend": case.option("backend", "eager")}
    split = list(layout.split) if isinstance(layout.split, tuple) else layout.split
    found["split"] = layout.stages if split is None and layout.stages > 1 else split
    found["schedule"] = layout.table(case.ranks, case.microbatches or 4)
    for group, make in GROUPS.items():
        own = {name.split(".")[1]: case.option(name) for name, _ in case.options if name.startswith(f"{group}.")}
        found |= {group: make(**own)} if own else {}
    return found


def rounds(case: Combination) -> bool:
    """Whether numbers may differ by rounding: other kernels, other orders of sums, other dtypes."""
    names, kinds = dict(case.options), set(case.layers)
    if case.kind != "mixed" or kinds & (ROUNDED | TIED) or {"clip", "keep"} & set(case.between):
        return True
    wide = {"gradients.dtype", "parallel.keep", "parallel.param_dtype", "parallel.reduce_dtype", "parallel.sum_order"}
    if wide & names.keys() or names.get("gradients.fused") or "backend" in names:
        return True
    both = any(each.size("dp_replicate") > 1 and each.size("dp_shard") > 1 for each in case.layouts)
    tables = any(isinstance(each.schedule, int) for each in case.layouts)  # a stage may be reduced more than once
    return both or (tables and any(each.replicas > 1 for each in case.layouts))


def compared(case: Combination, parts: Sequence[Ran]) -> str:
    """What differs from one process, or ""."""
    loose, wrong = ROUNDING if rounds(case) else 0.0, list[str]()
    counts = [len(step.losses) for step in parts[0].steps]
    for number, (replicas, params) in enumerate(train_alone(case, counts)):
        layout, held = case.layouts[number], set[str]()
        for rank, part in enumerate(parts):
            ours, theirs = part.steps[number], replicas[layout.as_mesh.replica(rank) // layout.size("cp")]
            held |= ours.grads.keys()
            pairs: dict[str, tuple[Tensors, Tensors]] = {
                "gradient": (ours.grads, theirs.grads),
                "buffer": (ours.buffers, theirs.buffers),
                "parameter": (part.params if number else {}, params),
            }
            if layout.size("cp") == 1:
                pairs["loss"], pairs["evaluation"] = (
                    ({str(n): each for n, each in enumerate(mine)}, {str(n): each for n, each in enumerate(other)})
                    for mine, other in ((ours.losses, theirs.losses), (ours.evaluated, theirs.evaluated))
                )
            for what, (mine, other) in pairs.items():
                wrong += [f"step {number}, rank {rank}: {what} {text}" for text in _unequal(mine, other, loose)]
        missing = {fqn for fqn, each in replicas[0].grads.items() if each.count_nonzero()} - held
        wrong += [f"step {number}: no rank has the gradient of {fqn}" for fqn in sorted(missing)]
    return "\n".join(wrong)


def _unequal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], loose: float) -> list[str]:
    """What differs; a value that only ours have must be 0."""
    found = []
    for name, mine in ours.items():
        other = theirs.get(name, torch.zeros_like(mine))
        least = loose * max(1e-2, other.abs().max().item() if other.numel() else 0.0)
        same = mine.shape == other.shape and (loose or mine.dtype == other.dtype)
        if not same or not torch.allclose(mine.to(other.dtype), other, rtol=loose, atol=least):
            found.append(f"{name}: {mine.flatten()[:4].tolist()} instead of {other.flatten()[:4].tolist()}")
    return found


def outcome(case: Combination, patience: float = PATIENCE) -> Report:
    """Run the case on its ranks and compare."""
    with tempfile.TemporaryDirectory() as folder:
        ended = rank_outcomes(on_rank, case.ranks, case, folder, timeout=patience, grace=patience / 3)
    failed = [each for each in ended if each.error is not None]
    if failed:
        notes = ["\n".join([f"rank {e.rank}: {e.error!r}", *getattr(e.error, "__notes__", ())]) for e in failed]
        texts = [f"rank {e.rank}: {e.value.refused or 'ended'}" for e in ended if e.error is None]
        late = all(isinstance(each.error, WorkerLate) for each in failed)
        return Report("hang" if late else "raw", "\n".join([*notes, *texts]))
    texts = [each.value.refused for each in ended]
    if any(texts):
        alike = all(texts) and not any(text.startswith(("MismatchError", "RankFailure")) for text in texts)
        return Report("refused", texts[0]) if alike else Report("wrong", f"ranks disagree: {texts}")
    with sharing(case):
        found = compared(case, [each.value for each in ended])
    return Report("wrong", found) if found else Report("right")


def shrunk(case: Combination, kind: str, tries: int = 60) -> Combination:
    """The smallest combination found that has the same outcome."""
    for each in smaller(case):
        if each != case and consistent(each) and tries > 0:
            tries -= 1
            if outcome(each, PATIENCE / 2).outcome == kind:
                return shrunk(each, kind, tries)
    return case
