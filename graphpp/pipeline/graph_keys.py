"""The keys under which the graphs of microbatches are kept, also where a forward changes numbers in attributes.

Contract
--------
- A key has everything that a captured graph depends on, so equal keys mean equal graphs.
- A forward may change numbers in attributes, and the capture has proved that its graph holds nevertheless. `after_step` gives
  the numbers the values that eager leaves. From then on `key` finds the graph under the changed numbers, and, for a number on
  whose value the graph does not depend, under every number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from torch import nn

from graphpp.capture.attributes.updates import Effect, NumberUpdate, Place, apply_updates
from graphpp.capture.fake_state import refuse_fake_state
from graphpp.capture.watch.conditions import Conditions, Watch, autocast_state, without
from graphpp.errors import CaptureError, GraphPPError
from graphpp.pipeline.step_call import GraphKey, StepCall

K = TypeVar("K")
V = TypeVar("V")
Around = tuple[Conditions, int, tuple[bool, str]]  # the state of the model, calls of `recapture`, autocast
Places = frozenset[tuple[int, str, int | str | None]]  # see `conditions.without`


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


class GraphKeys:
    """Makes the keys of calls. `limit`: the number of graphs that are kept."""

    def __init__(self, model: nn.Module, loss: Any, device_type: str, limit: int) -> None:
        self._model, self._device_type = model, device_type
        self._watch = Watch(model, loss)
        self._checked = self._watch.look()  # the latest look without a parameter of another thread's capture
        self._structure = self._checked.structure
        self._recaptures = 0
        self._index = {fqn: index for index, (fqn, _) in enumerate(model.named_modules())}
        self._known: Recent[GraphKey, GraphKey] = Recent(limit)  # one object per key: comparing it with itself costs nothing
        self._same: Recent[GraphKey, GraphKey] = Recent(limit)  # other conditions under which the graph of a key holds
        self._limit = limit
        self._latest = self._around(self._checked.conditions), self._no_keys()
        self._ignored: Recent[tuple[bool, tuple[str, ...]], set[Places]] = Recent(limit)

    def keys(self, training: bool, signatures: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], GraphKey]:
        """The key of each signature, with the model as it is now.

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
        around = self._around(look.conditions)
        if self._latest[0] != around:
            self._latest = around, self._no_keys()
        return {signature: self._known_key(training, signature) for signature in dict.fromkeys(signatures)}

    def _no_keys(self) -> Recent[tuple[bool, tuple[str, ...]], GraphKey]:
        return Recent(self._limit)

    def _known_key(self, training: bool, signature: tuple[str, ...]) -> GraphKey:
        """The key of a signature under the conditions of the latest look."""
        around, known = self._latest
        if (training, signature) in known:
            return known.use((training, signature))
        found = self._key(training, signature, around)
        known.keep((training, signature), found)
        return found

    def _around(self, conditions: Conditions) -> Around:
        return conditions, self._recaptures, autocast_state(self._device_type)

    def forget_values(self) -> None:
        """Hold no tensor any more that has left the model since the latest look."""
        self._checked = self._watch.look()
        self._latest = self._around(self._checked.conditions), self._no_keys()

    def after_capture(self) -> None:
        """Take for unchanged what a capture has changed outside of the modules."""
        self._watch.settle()

    def recapture(self) -> None:
        """Let every later call have a new key."""
        self._recaptures += 1

    def _key(self, training: bool, signature: tuple[str, ...], around: Around) -> GraphKey:
        for ignored in self._ignored.get((training, signature), ()):
            key = GraphKey(training, signature, (without(around[0], ignored), *around[1:]))
            if key in self._same:
                return self._same.use(key)
        key = GraphKey(training, signature, around)
        if key not in self._known:
            self._known.keep(key, key)
        return self._known.use(key)

    def after_step(self, call: StepCall, updates: Sequence[Sequence[NumberUpdate]]) -> None:
        """Change the numbers of the model as the call's microbatches do in eager; `updates`: of each microbatch's graph."""
        changing = {key: each for key, each in zip(call.keys, updates, strict=True) if each}
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
            self._same.keep(GraphKey(*kind, (without(around[0], ignored), *around[1:])), key)

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
