"""The keys under which the graphs of microbatches are kept, also where a forward changes numbers in attributes.

Contract: a key has everything that a captured graph depends on, so equal keys mean equal graphs. A forward may change numbers
in attributes, and the capture has shown that the graph holds for the changed numbers too. `after_step` changes them as eager
does, and from then on the graph is found under the changed numbers as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from torch import nn

from graphpp.capture.attributes.numbers import NumberUpdate
from graphpp.capture.fake_state import refuse_fake_state
from graphpp.capture.watch.conditions import Conditions, Watch, autocast_state
from graphpp.errors import CaptureError, GraphPPError
from graphpp.pipeline.step_call import GraphKey, StepCall

K = TypeVar("K")
V = TypeVar("V")
Around = tuple[Conditions, int, tuple[bool, str]]  # the state of the model, calls of `recapture`, autocast


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
        # The key of a graph, by each key for which the graph holds. One object per key: comparing it with itself costs nothing.
        self._known: Recent[GraphKey, GraphKey] = Recent(limit)
        self._limit = limit
        self._latest = self._around(self._checked.conditions), self._no_keys()

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
        key = GraphKey(training, signature, around)
        if key not in self._known:
            self._known.keep(key, key)
        return self._known.use(key)

    def after_step(self, call: StepCall, updates: Sequence[Sequence[NumberUpdate]]) -> None:
        """Change the numbers of the model as the call's microbatches do in eager; `updates`: of each microbatch's graph."""
        changed = [update.apply(self._model) for update in dict.fromkeys(chain.from_iterable(updates))]
        if any(changed):
            around = self._around(self._watch.look().conditions)
            for key in call.keys:
                self._known.keep(GraphKey(key.training, key.signature, around), key)


def check_same_updates(updates: Sequence[Sequence[NumberUpdate]]) -> None:
    """Raise `CaptureError` if the graphs of one call leave different numbers: each graph would depend on the one before."""
    for each in updates:
        for update in set(each) ^ set(updates[0]):
            raise CaptureError(
                f"the forward changes the number {update.place}, and differently for microbatches of different shapes: their "
                "order would decide. Give microbatches of one shape in one call, or make the number a buffer."
            )
