"""What a pipeline has built so far: graphs captured, runners made; each once, on all ranks alike.

Contract
--------
- One captured graph per signature of a microbatch, mode of the model (flags, dtypes) and autocast; one runner per
  sequence of graphs that a call's microbatches use.
- At most `max_graphs` graphs are kept, and those of the latest call if it uses more; the one used longest ago goes first, with
  a message that says what keeps changing.
- Whatever is built anew is compared over all ranks before it runs. If building fails on one rank it fails on all.
- The first graph decides which rank holds which parameter; a later one that would read it elsewhere is refused.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from graphpp.backends.record_programs import RecordedPrograms
from graphpp.batch.cut_batch import leading_size
from graphpp.batch.loss_weights import LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture import fingerprint
from graphpp.capture.outputs import check_mergeable
from graphpp.compiler import facts
from graphpp.compiler.assemble import Assembly
from graphpp.compiler.build import Built, Compiler, check_alike
from graphpp.errors import GraphPPError
from graphpp.parallel.agreement import Agreement, Facts
from graphpp.runtime import program
from graphpp.runtime.model_state import ModelState, tensor_lines
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.schedule import Schedule

K = TypeVar("K")
V = TypeVar("V")

_LOG = logging.getLogger("graphpp")


@dataclass(frozen=True, eq=True)
class Key:
    """What a captured graph depends on. It is large and looked up for every microbatch, so its hash is taken once."""

    training: bool
    signature: tuple[str, ...]
    around: tuple[Any, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.training, self.signature, self.around))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Call:
    """What one call of every rank is given. Microbatches with equal keys are served by one captured graph."""

    parts: Sequence[FlatMicrobatch]
    training: bool
    keys: tuple[Key, ...]
    weighting: LossWeighting

    @property
    def distinct(self) -> dict[Key, FlatMicrobatch]:
        """The first microbatch of each key."""
        first: dict[Key, FlatMicrobatch] = {}
        for key, part in zip(self.keys, self.parts, strict=True):
            first.setdefault(key, part)
        return first


@dataclass(frozen=True)
class Ready:
    """What a call needs: the graph of each microbatch, and their runner; what its replicas must have alike."""

    built: Sequence[Built]
    runner: GraphPPRunner
    alike: Facts


class _Recent(OrderedDict[K, V]):
    """The values used last, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def use(self, key: K) -> V:
        """A value, which is now the one used last."""
        self.move_to_end(key)
        return self[key]

    def keep(self, key: K, value: V) -> K | None:
        """Keep a value; the key of the one that had to go."""
        self[key] = value
        return self.popitem(last=False)[0] if len(self) > self._limit else None


class Library:
    """Builds what is new and keeps it."""

    def __init__(self, compiler: Compiler, state: ModelState, agreement: Agreement) -> None:
        self._compiler, self._state, self._agreement = compiler, state, agreement
        self._modules = dict(compiler.model.named_modules())
        self._watched = fingerprint.watch_modules(compiler.model, compiler.loss)
        self._structure = fingerprint.module_structure(self._watched)
        limit = compiler.options.debug.max_graphs
        self._known: _Recent[Key, Key] = _Recent(limit)  # one object per key: comparing it with itself costs nothing
        self._facts: _Recent[tuple[Any, ...], Facts] = _Recent(limit)
        self._built: _Recent[Key, Built] = _Recent(limit)
        self._ready: _Recent[tuple[Key, ...], Ready] = _Recent(limit)
        self._assembly = Assembly(compiler, state, agreement)
        self.first: Built | None = None

    @property
    def graphs(self) -> RecordedPrograms:
        """The CUDA graphs of its runners."""
        return self._assembly.graphs

    @property
    def owners(self) -> Mapping[str, Sequence[int]]:
        """The ranks that hold each parameter."""
        assert self.first is not None
        return self.first.ranks_of_parameter

    def call(self, parts: Sequence[FlatMicrobatch], weighting: LossWeighting, *, training: bool) -> Call:
        """A call over these microbatches, with the model as it is now."""
        if fingerprint.module_structure(self._watched) != self._structure:
            raise GraphPPError(
                "the model was changed after graphpp.compile: a module was added, exchanged or removed, or parameters were "
                "tied or untied. Change the model first, then compile it (again)."
            )
        around = fingerprint.capture_conditions(self._watched, self._compiler.place.device.type)
        keys = {signature: self._key(training, signature, around) for signature in {part.signature for part in parts}}
        return Call(parts, training, tuple(keys[part.signature] for part in parts), weighting)

    def _key(self, training: bool, signature: tuple[str, ...], around: tuple[Any, ...]) -> Key:
        key = Key(training, signature, around)
        if key not in self._known:
            self._known.keep(key, key)
        return self._known.use(key)

    def facts(self, call: Call) -> Facts:
        """What this rank is about to do."""
        kept = self._kept(call)
        key = (kept, *call.keys)
        if key not in self._facts:
            self._facts.keep(
                key,
                Facts(
                    {
                        "the call": ["step" if call.training else "eval"],
                        "the number of microbatches": [str(len(call.parts))],
                        "the microbatch": _spelled(call),
                        "the model": tensor_lines(self._compiler.model),
                        "training flags": [f"{fqn}.training={module.training}" for fqn, module in self._modules.items()],
                        "autocast": [str(call.keys[0].around[-1])],
                        "what it has kept for this call": [kept],
                    }
                ),
            )
        return self._facts.use(key).adding("the weights of the loss", call.weighting.description)

    def _kept(self, call: Call) -> str:
        """Ranks that build and ranks that run would wait for each other: they must have kept the same."""
        if call.keys in self._ready:
            return "a graph and its runner"
        if all(key in self._built for key in call.keys):
            return "a graph"
        return "nothing yet (such a call is new, or an attribute or hook of the model has changed)"

    def build(self, call: Call, microbatches: int) -> list[Built]:
        """The captured, cut graph that serves each microbatch of a call."""
        made = {key: self._build(key, part, microbatches, call.training) for key, part in call.distinct.items()}
        each = [made[key] for key in call.keys]
        check_alike(each)
        if not call.training:
            check_mergeable([built.captured for built in each], [leading_size(part) for part in call.parts])
        return each

    def _build(self, key: Key, part: FlatMicrobatch, microbatches: int, training: bool) -> Built:
        if key in self._built:
            return self._built.use(key)
        built = self._agreement.together(
            lambda: self._compiler.build(part, microbatches, training=training), lambda new: new.facts
        )
        self.first = self.first or built
        _check_homes(self.first, built)
        before = next(reversed(self._built), None)
        dropped = self._built.keep(key, built)
        if dropped is not None and before is not None:
            _LOG.warning(
                "the %d graphs that are kept at most are used up, so the one used longest ago was dropped. The latest was "
                "captured because %s. Pad to a few shapes, pass numbers that change as tensors, or raise "
                "debug=graphpp.Debug(max_graphs=...).",
                self._compiler.options.debug.max_graphs,
                _what_changed(before, key),
            )
        return built

    def _forget_all_but(self, latest: tuple[Key, ...]) -> None:
        """Drop the runners, but the latest, that use a graph that is no longer kept."""
        for keys in [keys for keys in self._ready if keys != latest and any(key not in self._built for key in keys)]:
            del self._ready[keys]

    def ready(self, call: Call) -> Ready:
        """All that a call needs."""
        if call.keys not in self._ready:
            built = self.build(call, len(call.parts))
            schedule = self._agreement.together(
                lambda: self._schedule(built, call), lambda _: facts.of_copies(self._state, self._copies(built[0]))
            )
            place = self._compiler.place
            rank, device = place.rank, place.device
            self._state.move(set().union(*(each.parameters(rank) | each.buffers(rank) for each in built)), device)
            runner = self._assembly.runner(built, schedule, place.replicas, self.owners)
            alike = facts.of_replica(runner.program, schedule, rank)
            self._ready.keep(call.keys, Ready(built, runner, alike))
            self._forget_all_but(call.keys)
            self._assembly.keep_only([*self._built.values(), *built])
        for key in call.keys:
            if key in self._built:
                self._built.use(key)
        return self._ready.use(call.keys)

    def under(self, ready: Ready, table: Schedule) -> Ready:
        """The same graphs under another table of computations, on the same ranks, without replicas; it is not kept.

        Called by all ranks.
        """
        return replace(ready, runner=self._assembly.runner(ready.built, add_send_recv(table), None, self.owners))

    def _schedule(self, built: Sequence[Built], call: Call) -> Schedule:
        rank = self._compiler.place.rank
        for each in {id(each): each for each in built}.values():
            self._state.check_memory([*each.parameters(rank), *each.buffers(rank)])
        return self._compiler.schedule(built, training=call.training)

    def _copies(self, built: Built) -> list[str]:
        """This rank's parameters that other ranks hold as well."""
        rank = self._compiler.place.rank
        return [fqn for fqn, ranks in built.ranks_of_parameter.items() if len(ranks) > 1 and rank in ranks]


def _spelled(call: Call) -> list[str]:
    """Which microbatches are alike, and the signature of each kind."""
    kinds = call.distinct
    alike = [", ".join(str(index) for index, key in enumerate(call.keys) if key == kind) for kind in kinds]
    first = "microbatches of one shape" if len(kinds) == 1 else f"microbatches of {len(kinds)} shapes: {' | '.join(alike)}"
    return [first, *(line for part in kinds.values() for line in part.signature)]


def _what_changed(before: Key, key: Key) -> str:
    """What a new graph was captured for, compared with the one captured before it."""
    if before.training != key.training:
        return "training and evaluation took turns"
    pairs = zip(key.signature, before.signature, strict=False)
    return next((f"it had {new}, after {old}" for new, old in pairs if new != old), "an attribute of the model changed")


def _check_homes(first: Built, built: Built) -> None:
    """Parameters and written buffers must be read where the first graph keeps them: nobody updates them elsewhere."""
    homes = {fqn: set(ranks) for fqn, ranks in first.ranks_of_parameter.items()}
    for stage, fqn in first.written_buffers():
        homes.setdefault(fqn, set()).add(first.plan.rank_of_stage[stage.index])
    for stage in built.program.stages:
        rank = built.plan.rank_of_stage[stage.index]
        for role in stage.inputs:
            if isinstance(role, program.Parameter | program.Buffer) and rank not in homes.get(role.fqn, {rank}):
                raise GraphPPError(
                    f"{role.fqn} is kept on rank {min(homes[role.fqn])}, but for this batch, or in this mode, stage "
                    f"{stage.index} on rank {rank} reads it, where it is never updated. Choose a split that keeps its "
                    "users together, or make the pipeline with an example of the call that trains it."
                )
