"""What a pipeline has built so far: graphs captured, runners made; each once, on all ranks alike.

Contract
--------
- One captured graph per signature of a microbatch, mode of the model (flags, dtypes) and autocast; one runner per graph
  and number of microbatches.
- Whatever is built anew is compared over all ranks before it runs. If building fails on one rank it fails on all.
- The first graph decides which rank holds which parameter; a later one that would read it elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpp import facts, fingerprint
from graphpp.compiler import Built, Compiler
from graphpp.errors import GraphPPError
from graphpp.runtime import program
from graphpp.runtime.agreement import Agreement, Facts
from graphpp.runtime.runner import GraphPPRunner
from graphpp.runtime.schedule import Schedule
from graphpp.runtime.state import ModelState
from graphpp.signature import Leaves

_Key = tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """What one call of every rank is given. Calls with equal keys are served by one captured graph."""

    parts: Sequence[Leaves]
    training: bool
    key: _Key


@dataclass(frozen=True)
class Ready:
    """What a call needs: the graph, its runner, and the gradient of the step's loss by each microbatch's loss."""

    built: Built
    runner: GraphPPRunner
    seeds: list[torch.Tensor]


class Library:
    """Builds what is new and keeps it."""

    def __init__(self, compiler: Compiler, state: ModelState, agreement: Agreement) -> None:
        self._compiler, self._state, self._agreement = compiler, state, agreement
        self._modules = dict(compiler.model.named_modules())
        self._watched = fingerprint.modules_of(compiler.model, compiler.loss)
        self._structure = fingerprint.structure(self._watched)
        self._facts: dict[_Key, Facts] = {}
        self._built: dict[_Key, Built] = {}
        self._ready: dict[_Key, Ready] = {}
        self.first: Built | None = None

    def call(self, parts: Sequence[Leaves], *, training: bool) -> Call:
        """A call over these microbatches, with the model as it is now."""
        if fingerprint.structure(self._watched) != self._structure:
            raise GraphPPError(
                "the model was changed after graphpp.compile: a module was added, exchanged or removed, or parameters were "
                "tied or untied. Change the model first, then compile it (again)."
            )
        around = fingerprint.circumstances(self._watched, self._compiler.settings.place.device.type)
        return Call(parts, training, (training, parts[0].signature, *around))

    def facts(self, call: Call) -> Facts:
        """What this rank is about to do."""
        kept = self._kept(call)
        key = (len(call.parts), kept, call.key)
        if key not in self._facts:
            self._facts[key] = Facts(
                {
                    "the call": ["step" if call.training else "eval"],
                    "the number of microbatches": [str(len(call.parts))],
                    "the microbatch": call.parts[0].signature,
                    "the model": facts.of_model(self._compiler.model),
                    "training flags": [f"{fqn}.training={module.training}" for fqn, module in self._modules.items()],
                    "autocast": [str(call.key[-1])],
                    "what it has kept for this call": [kept],
                }
            )
        return self._facts[key]

    def _kept(self, call: Call) -> str:
        """Ranks that build and ranks that run would wait for each other: they must have kept the same."""
        if call.key not in self._built:
            return "nothing yet (such a call is new, or an attribute or hook of the model has changed)"
        return "a graph and its runner" if (len(call.parts), call.key) in self._ready else "a graph"

    def build(self, call: Call, microbatches: int) -> Built:
        """The captured, cut graph that serves a call."""
        if call.key not in self._built:
            built = self._agreement.together(
                lambda: self._compiler.build(call.parts[0], microbatches, training=call.training), lambda new: new.facts
            )
            self.first = self.first or built
            _check_homes(self.first, built)
            self._built[call.key] = built
        return self._built[call.key]

    def ready(self, call: Call) -> Ready:
        """All that a call needs."""
        key = (len(call.parts), call.key)
        if key not in self._ready:
            built = self.build(call, len(call.parts))
            schedule = self._agreement.together(
                lambda: self._schedule(built, call), lambda _: facts.of_copies(self._state, self._copies(built))
            )
            place = self._compiler.settings.place
            self._state.move(built.parameters(place.rank) | built.buffers(place.rank), place.device)
            runner = GraphPPRunner(built.program, schedule, self._state, place)
            self._ready[key] = Ready(built, runner, self._seeds(built, len(call.parts)))
        return self._ready[key]

    def _schedule(self, built: Built, call: Call) -> Schedule:
        rank = self._compiler.settings.place.rank
        self._state.check_memory([*built.parameters(rank), *built.buffers(rank)])
        return self._compiler.schedule(built, len(call.parts), training=call.training)

    def _copies(self, built: Built) -> list[str]:
        """This rank's parameters that other ranks hold as well."""
        rank = self._compiler.settings.place.rank
        return [fqn for fqn, ranks in built.ranks_of_parameter.items() if len(ranks) > 1 and rank in ranks]

    def _seeds(self, built: Built, count: int) -> list[torch.Tensor]:
        """One gradient per microbatch, as autograd would make it from `loss / count` or from the sum."""
        if built.program.loss is None:
            return []
        settings = self._compiler.settings
        one = torch.ones((), dtype=built.program.loss.dtype, device=settings.place.device)
        return [one / count if settings.loss_reduction == "mean" else one] * count


def _check_homes(first: Built, built: Built) -> None:
    """Parameters and written buffers must be read where the first graph keeps them: nobody updates them elsewhere."""
    homes = {fqn: set(ranks) for fqn, ranks in first.ranks_of_parameter.items()}
    for stage, fqn in first.written_buffers():
        homes.setdefault(fqn, set()).add(first.plan.rank_of_stage[stage.index])
    for stage in built.program.stages:
        rank = built.plan.rank_of_stage[stage.index]
        for role in (role for item in stage.programs.values() for role in item.inputs):
            if isinstance(role, program.Parameter | program.Buffer) and rank not in homes.get(role.fqn, {rank}):
                raise GraphPPError(
                    f"{role.fqn} is kept on rank {min(homes[role.fqn])}, but for this batch, or in this mode, stage "
                    f"{stage.index} on rank {rank} reads it, where it is never updated. Choose a split that keeps its "
                    "users together, or make the pipeline with an example of the call that trains it."
                )
