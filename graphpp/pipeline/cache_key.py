"""The keys under which a pipeline keeps runners and captured graphs, and the call that has them.

    `CallKey`      the graph keys of a call's microbatches, in order    -> its runner (`graph_cache.py`)
    `GraphKey`     all that a captured graph depends on                 -> the graph (`graph_cache.py`)
    `GraphKey.of_kind`   the same without the sizes of the tensors      -> graphs with open sizes (`varying_sizes.py`)

Contract
--------
- Equal keys mean equal graphs.
- A forward may change numbers in attributes, and the capture has proved that its graph holds nevertheless. `after_step` gives
  the numbers the values that eager leaves. From then on `key` finds the graph under the changed numbers, and, for a number on
  whose value the graph does not depend, under every number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn

from graphpp.batch.loss_weights import LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.attributes.updates import Effect, NumberUpdate, Place, apply_updates
from graphpp.capture.fake_state import refuse_fake_state
from graphpp.capture.watch.conditions import Conditions, Watch, autocast_state, without
from graphpp.errors import CaptureError, GraphPPError

K = TypeVar("K")
V = TypeVar("V")
Places = frozenset[tuple[int, str, int | str | None]]  # see `conditions.without`


class Around(NamedTuple):
    """All that a trace reads besides its microbatch: the state of the model, the calls of `recapture`, autocast."""

    conditions: Conditions
    recaptures: int
    autocast: tuple[bool, str]


class GraphKey(NamedTuple):
    """All that a captured graph depends on: mode, signature of the microbatch, and the state around the call."""

    training: bool
    signature: tuple[str, ...]
    around: Around

    def of_kind(self, part: FlatMicrobatch) -> tuple[Any, ...]:
        """The key of a graph with open sizes, which serves microbatches of the kind of `part`."""
        return self.training, part.kind, self.around

    def difference(self, before: GraphKey) -> str:
        """Why a graph captured under `before` does not serve, in words."""
        if before.training != self.training:
            return "training and evaluation took turns"
        pairs = zip(self.signature, before.signature, strict=False)
        return next((f"it had {new}, after {old}" for new, old in pairs if new != old), "an attribute of the model changed")


CallKey = tuple[GraphKey, ...]


@dataclass(frozen=True)
class StepCall:
    """One call of every rank: its microbatches, their keys, and the weights of their losses.

    Microbatches with equal keys are served by one captured graph.
    """

    parts: Sequence[FlatMicrobatch]
    key: CallKey
    weighting: LossWeighting

    @property
    def training(self) -> bool:
        """Whether gradients are computed."""
        return self.key[0].training

    @cached_property
    def distinct(self) -> dict[GraphKey, FlatMicrobatch]:
        """The first microbatch of each key."""
        first: dict[GraphKey, FlatMicrobatch] = {}
        for key, part in zip(self.key, self.parts, strict=True):
            first.setdefault(key, part)
        return first

    def shapes(self) -> list[str]:
        """The number of microbatches, and the shapes of the tensors of each kind: lines that ranks compare."""
        tensors = (pair for part in self.distinct.values() for pair in part.tensors.items())
        return [f"{len(self.parts)} microbatches", *(f"{path}: {list(each.shape)}" for path, each in tensors)]

    def describe(self) -> list[str]:
        """The microbatches of each kind, and the signature of the kind: lines that ranks compare."""
        kinds = self.distinct
        alike = [", ".join(str(index) for index, key in enumerate(self.key) if key == kind) for kind in kinds]
        first = "microbatches of one shape" if len(kinds) == 1 else f"microbatches of {len(kinds)} shapes: {' | '.join(alike)}"
        return [first, *(line for part in kinds.values() for line in part.signature)]


class Recent(OrderedDict[K, V], Generic[K, V]):
    """A cache of at most `limit` values, from which the least recently used one is dropped."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def use(self, key: K) -> V:
        """The value of a key, which is now the most recently used one."""
        self.move_to_end(key)
        return self[key]

    def keep(self, key: K, value: V) -> K | None:
        """Keep a value; returns the key of the value that was dropped for it, or None."""
        self[key] = value
        return self.popitem(last=False)[0] if len(self) > self._limit else None


class KeyMaker:
    """Makes the keys of calls. `limit`: the number of states of the model of which one object each is kept."""

    def __init__(self, model: nn.Module, loss: Any, device_type: str, limit: int) -> None:
        self._model, self._device_type = model, device_type
        self._watch = Watch(model, loss)
        self._checked = self._watch.look()  # the latest look without a parameter of another thread's capture
        self._structure = self._checked.structure
        self._recaptures = 0
        self._index = {fqn: index for index, (fqn, _) in enumerate(model.named_modules())}
        self._states: Recent[Conditions, Conditions] = Recent(limit)  # one object for equal states: keys compare by identity
        self._same: Recent[GraphKey, GraphKey] = Recent(limit)  # other conditions under which the graph of a key holds
        self._ignored: Recent[tuple[bool, tuple[str, ...]], set[Places]] = Recent(limit)

    def key(self, training: bool, signatures: Iterable[tuple[str, ...]]) -> CallKey:
        """The key of a call over microbatches with these signatures, with the model as it is now.

        Raises `GraphPPError` where modules or ties of parameters have changed since the pipeline was made, and while another
        thread captures the model.
        """
        look = self._watch.look()
        if look is not self._checked:
            refuse_fake_state(self._watch.modules)
            self._checked = look
        if look.structure is not self._structure and look.structure != self._structure:
            raise GraphPPError(
                "the model was changed after graphpp.compile: a module was added, exchanged or removed, or parameters were "
                "tied or untied. Change the model first, then compile it (again)."
            )
        around, all_of = self._around(look.conditions), list(signatures)
        keys = {signature: self._key(training, signature, around) for signature in dict.fromkeys(all_of)}
        return tuple(keys[signature] for signature in all_of)

    def _around(self, conditions: Conditions) -> Around:
        if conditions not in self._states:
            self._states.keep(conditions, conditions)
        return Around(self._states.use(conditions), self._recaptures, autocast_state(self._device_type))

    def forget_values(self) -> None:
        """Hold no tensor any more that has left the model since the latest look."""
        self._checked = self._watch.look()

    def after_capture(self) -> None:
        """Take for unchanged what a capture has changed outside of the modules."""
        self._watch.settle()

    def recapture(self) -> None:
        """Let every later call have a new key."""
        self._recaptures += 1

    def _key(self, training: bool, signature: tuple[str, ...], around: Around) -> GraphKey:
        for ignored in self._ignored.get((training, signature), ()):
            key = GraphKey(training, signature, around._replace(conditions=without(around.conditions, ignored)))
            if key in self._same:
                return self._same.use(key)
        return GraphKey(training, signature, around)

    def after_step(self, call: StepCall, updates: Sequence[Sequence[NumberUpdate]]) -> None:
        """Change the numbers of the model as the call's microbatches do in eager; `updates`: of each microbatch's graph."""
        changing = {key: each for key, each in zip(call.key, updates, strict=True) if each}
        if not changing:
            return
        apply_updates(self._model, updates)
        around = self._around(self._watch.look().conditions)
        for key, each in changing.items():
            ignored = frozenset(self._indexed(update.place) for update in each if update.effect is not Effect.LAST)
            kind = (key.training, key.signature)
            if kind not in self._ignored:
                self._ignored.keep(kind, set())
            self._ignored.use(kind).add(ignored)
            self._same.keep(GraphKey(*kind, around._replace(conditions=without(around.conditions, ignored))), key)

    def _indexed(self, place: Place) -> tuple[int, str, int | str | None]:
        return self._index[place.module], place.attribute, place.item


def check_same_updates(updates: Sequence[Sequence[NumberUpdate]]) -> None:
    """Raise `CaptureError` if the graphs of one call change numbers differently: each graph would depend on the one before."""
    kinds = [
        {update.place: update.value if update.effect is Effect.LAST else update.effect for update in each} for each in updates
    ]
    for kind in kinds:
        for place in kind.keys() | kinds[0].keys():
            if kind.get(place) != kinds[0].get(place):
                raise CaptureError(
                    f"the forward changes the number {place}, and differently for microbatches of different shapes: their "
                    "order would decide. Give microbatches of one shape in one call, or make the number a buffer."
                )
