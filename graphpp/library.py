"""What a pipeline has built so far: graphs captured, runners made; each once, on all ranks alike.

Contract
--------
- One captured graph per signature of a microbatch, mode of the model (flags, dtypes) and autocast; one runner per graph and
  number of microbatches.
- Whatever is built anew is compared over all ranks before it runs. If building fails on one rank it fails on all.
- The first graph decides which rank holds which parameter; a later one that would read it elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpp import facts
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
class Ready:
    """What a step needs: the graph, its runner, and the gradient of the step's loss by each microbatch's loss."""

    built: Built
    runner: GraphPPRunner
    seeds: list[torch.Tensor]


class Library:
    """Builds what is new and keeps it."""

    def __init__(self, compiler: Compiler, state: ModelState, agreement: Agreement) -> None:
        self._compiler, self._state, self._agreement = compiler, state, agreement
        self._modules = list(compiler.model.modules())
        self._facts: dict[_Key, Facts] = {}
        self._built: dict[_Key, Built] = {}
        self._ready: dict[_Key, Ready] = {}
        self.first: Built | None = None

    def facts(self, parts: Sequence[Leaves], *, training: bool) -> Facts:
        """What this rank is about to do with these microbatches."""
        key = (len(parts), self._key(parts[0], training))
        if key not in self._facts:
            self._facts[key] = Facts(
                {
                    "the call": ["step" if training else "eval"],
                    "the number of microbatches": [str(len(parts))],
                    "the microbatch": parts[0].signature,
                    "the model": facts.of_model(self._compiler.model),
                    "training flags": [
                        f"{name}.training={m.training}" for name, m in self._compiler.model.named_modules()
                    ],
                    "autocast": [str(_autocast(self._compiler.settings.place.device.type))],
                }
            )
        return self._facts[key]

    def build(self, example: Leaves, microbatches: int, *, training: bool) -> Built:
        """The captured, cut graph for microbatches like `example`."""
        key = self._key(example, training)
        if key not in self._built:
            built = self._agreement.together(
                lambda: self._compiler.build(example, microbatches, training=training), lambda new: new.facts
            )
            if self.first is None:
                self.first = built
            _check_homes(self.first, built)
            self._built[key] = built
        return self._built[key]

    def ready(self, parts: Sequence[Leaves], *, training: bool) -> Ready:
        """All that a step over these microbatches needs."""
        key = (len(parts), self._key(parts[0], training))
        if key not in self._ready:
            built = self.build(parts[0], len(parts), training=training)
            schedule = self._agreement.together(
                lambda: self._schedule(built, len(parts), training),
                lambda _: facts.of_copies(self._state, self._copies(built)),
            )
            place = self._compiler.settings.place
            self._state.move(built.parameters(place.rank) | built.buffers(place.rank), place.device)
            runner = GraphPPRunner(built.program, schedule, self._state, place)
            self._ready[key] = Ready(built, runner, self._seeds(built, len(parts)))
        return self._ready[key]

    def _key(self, part: Leaves, training: bool) -> _Key:
        parameters = (self._state.tensor(fqn) for fqn in self._state.parameters)
        return (
            training,
            part.signature,
            tuple(module.training for module in self._modules),
            tuple((p.requires_grad, p.dtype, p.shape) for p in parameters),
            _autocast(self._compiler.settings.place.device.type),
        )

    def _schedule(self, built: Built, microbatches: int, training: bool) -> Schedule:
        rank = self._compiler.settings.place.rank
        self._state.check_memory([*built.parameters(rank), *built.buffers(rank)])
        return self._compiler.schedule(built, microbatches, training=training)

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


def _autocast(device_type: str) -> tuple[bool, str]:
    return torch.is_autocast_enabled(device_type), str(torch.get_autocast_dtype(device_type))


def _check_homes(first: Built, built: Built) -> None:
    """Parameters and written buffers must be read where the first graph keeps them: elsewhere they are never updated."""
    homes = {fqn: set(ranks) for fqn, ranks in first.ranks_of_parameter.items()}
    for stage, fqn in first.written_buffers():
        homes.setdefault(fqn, set()).add(first.plan.rank_of_stage[stage.index])
    for stage in built.program.stages:
        rank = built.plan.rank_of_stage[stage.index]
        for role in (role for item in stage.programs.values() for role in item.inputs):
            if isinstance(role, program.Parameter | program.Buffer) and rank not in homes.get(role.fqn, {rank}):
                raise GraphPPError(
                    f"{role.fqn} is kept on rank {min(homes[role.fqn])}, but for this batch, or in this mode, stage {stage.index} "
                    f"on rank {rank} reads it, where it is never updated. Choose a split that keeps its users together, or make "
                    "the pipeline with an example of the call that trains it."
                )
