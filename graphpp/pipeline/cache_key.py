"""The cache keys of runners and captured graphs, and the call that has them.

    `CallKey`            the graph keys of a call's microbatches, in order    -> runner (`graph_cache.py`)
    `GraphKey`           everything that a captured graph depends on          -> graph (`graph_cache.py`)
    `GraphKey.of_kind`   a `GraphKey` without the sizes of the tensors        -> graphs with open sizes (`varying_sizes.py`)

Contract: equal keys mean equal graphs. A forward may change numbers in attributes; the capture has shown that the graph is
valid for the changed numbers too. `after_step` changes them as eager does, and maps the new key to the same graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn

from graphpp.batch.loss_weights import LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.attributes.numbers import NumberUpdate
from graphpp.capture.fake_state import refuse_fake_state
from graphpp.capture.watch.conditions import Conditions, Look, Watch, autocast_state
from graphpp.errors import CaptureError, GraphPPError

K = TypeVar("K")
V = TypeVar("V")


class Around(NamedTuple):
    """Everything besides the microbatch that a trace reads: the state of the model, the calls of `recapture`, autocast."""

    conditions: Conditions
    recaptures: int
    autocast: tuple[bool, str]


class GraphKey(NamedTuple):

    training: bool
    signature: tuple[str, ...]
    around: Around

    def of_kind(self, part: FlatMicrobatch) -> tuple[Any, ...]:
        """The key of the graphs with open sizes for microbatches of the kind of `part`."""
        return self.training, part.kind, self.around


CallKey = tuple[GraphKey, ...]


@dataclass(frozen=True)
class StepCall:
    """One call of every rank. One captured graph serves all microbatches with equal keys."""

    parts: Sequence[FlatMicrobatch]
    key: CallKey
    weighting: LossWeighting

    @property
    def training(self) -> bool:
        return self.key[0].training

    @cached_property
    def distinct(self) -> dict[GraphKey, FlatMicrobatch]:
        first: dict[GraphKey, FlatMicrobatch] = {}
        for key, part in zip(self.key, self.parts, strict=True):
            first.setdefault(key, part)
        return first

    def shapes(self) -> list[str]:
        """The number of microbatches, and the tensor shapes of each kind: lines that ranks compare."""
        tensors = (pair for part in self.distinct.values() for pair in part.tensors.items())
        return [f"{len(self.parts)} microbatches", *(f"{path}: {list(each.shape)}" for path, each in tensors)]

    def describe(self) -> list[str]:
        """The microbatches and the signature of each kind: lines that ranks compare."""
        kinds = self.distinct
        alike = [", ".join(str(index) for index, key in enumerate(self.key) if key == kind) for kind in kinds]
        first = "microbatches of one shape" if len(kinds) == 1 else f"microbatches of {len(kinds)} shapes: {' | '.join(alike)}"
        return [first, *(line for part in kinds.values() for line in part.signature)]


class Recent(OrderedDict[K, V], Generic[K, V]):
    """A cache of at most `limit` values that drops the least recently used one."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def use(self, key: K) -> V:
        self.move_to_end(key)
        return self[key]

    def keep(self, key: K, value: V) -> K | None:
        """Keep a value; returns the key of the dropped value, or None."""
        self[key] = value
        return self.popitem(last=False)[0] if len(self) > self._limit else None


class KeyMaker:
    """Makes the keys of calls. `limit`: the number of remembered model states, one object each."""

    def __init__(self, model: nn.Module, loss: Any, device_type: str, limit: int) -> None:
        self._model, self._device_type = model, device_type
        self._watch = Watch(model, loss)
        self._recaptures = 0
        self._states: Recent[Conditions, Conditions] = Recent(limit)  # one object for equal states: keys compare by identity
        self._take(self._watch.look())
        self._structure = self._checked.structure
        self._same: Recent[GraphKey, GraphKey] = Recent(limit)  # keys under changed numbers -> the key of the graph

    def key(self, training: bool, signatures: Iterable[tuple[str, ...]]) -> CallKey:
        """The key of a call over microbatches with these signatures, with the model in its current state.

        Raises `GraphPPError` if modules or ties of parameters have changed since the pipeline was made, and while another
        thread captures the model.
        """
        look = self._watch.look()
        refuse_fake_state(self._watch.modules)
        if look is not self._checked:
            self._take(look)
        if look.structure is not self._structure and look.structure != self._structure:
            raise GraphPPError(
                "the model was changed after graphpp.compile: a module was added, exchanged or removed, or parameters were "
                "tied or untied. Change the model first, then compile it (again)."
            )
        around = self._around()
        keys = (GraphKey(training, signature, around) for signature in signatures)
        return tuple(self._same.get(key, key) for key in keys)

    def _take(self, look: Look) -> None:
        """Make `look` the latest one; one object stands for all equal states."""
        self._checked = look
        if look.conditions not in self._states:
            self._states.keep(look.conditions, look.conditions)
        self._conditions = self._states.use(look.conditions)

    def _around(self) -> Around:
        return Around(self._conditions, self._recaptures, autocast_state(self._device_type))

    def forget_values(self) -> None:
        """Drop references to tensors that have left the model since the latest look."""
        self._take(self._watch.look())

    def after_capture(self) -> None:
        """Treat changes that a capture made outside of the modules as no changes."""
        self._watch.settle()

    def recapture(self) -> None:
        self._recaptures += 1

    def difference(self, key: GraphKey, before: GraphKey) -> str:
        """Why `key` is another one than `before`, in words."""
        if before.training != key.training:
            return "training and evaluation took turns"
        lines = zip(key.signature, before.signature, strict=False)
        changed = map(self._watch.name_of, key.around.conditions.changed(before.around.conditions))
        reasons = [f"it had {new}, after {old}" for new, old in lines if new != old] + [f"{name} changed" for name in changed]
        return next(iter(reasons), "autocast changed, or pipe.recapture() was called")

    def after_step(self, call: StepCall, updates: Sequence[Sequence[NumberUpdate]]) -> None:
        """Change the model's numbers as the call's microbatches do in eager; `updates`: of each microbatch's graph."""
        changed = [update.apply(self._model) for update in dict.fromkeys(chain.from_iterable(updates))]
        if any(changed):
            self._take(self._watch.look())
            for key in call.key:
                self._same.keep(key._replace(around=self._around()), key)


def check_same_updates(updates: Sequence[Sequence[NumberUpdate]]) -> None:
    """Raise `CaptureError` if the graphs of one call change numbers differently: the order of microbatches would matter."""
    for each in updates:
        for update in set(each) ^ set(updates[0]):
            raise CaptureError(
                f"the forward changes the number {update.place}, and differently for microbatches of different shapes: their "
                "order would decide. Give microbatches of one shape in one call, or make the number a buffer."
            )
