"""Saved values that wait for their backward in the host's memory, and come back in time.

Contract
--------
- An `OffloadWindow` says which values of one stage's microbatch leave after their forward, and by which computing actions
  of their rank: `evict_after` (when it is over, their memory is free), `prefetch_at` (when it begins, they start to come back),
  `first_use` (they are there). All of it was decided with the plan; nothing here waits for the host or asks the device.
- `Offloader.before` and `after` stand around every computing action. They take values out of what the stage holds, and
  put them back there: the stage and its programs know nothing of it. The values are the same bits, with their strides.
- On CUDA copies go over a stream of their own, to pinned memory. A copy away begins when the forward is done, and the
  computing stream waits for it at the end of `evict_after`: memory is given back in the order of that stream, however far the
  host is ahead. A copy back begins when the computing stream comes to `prefetch_at`, into memory of that stream.
- On the CPU the values are in the host's memory already: they stay, and the same steps are taken (`Staying`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from graphpp.runtime.program import TensorMeta
from graphpp.runtime.stage import GraphStage
from graphpp.runtime.strided_copies import meta_of, packed
from graphpp.runtime.transport import Landing
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow

K = TypeVar("K")


class Mover(Protocol[K]):
    """Moves one value; what it hands out in between (K) is its own business."""

    def leave(self, value: torch.Tensor) -> K:
        """Start to copy a value away."""

    def free(self, moved: K) -> None:
        """Give back the memory where the value was."""

    def start(self, moved: K) -> None:
        """Start to copy it back."""

    def arrive(self, moved: K) -> torch.Tensor:
        """The value, which what is computed from now on may read."""

    def forget(self) -> None:
        """Values under way will not be asked for."""


class Staying:
    """On the CPU: nothing moves."""

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """The value itself."""
        return value

    def free(self, moved: torch.Tensor) -> None:
        """It is where it will be needed."""

    def start(self, moved: torch.Tensor) -> None:
        """It is there."""

    def arrive(self, moved: torch.Tensor) -> torch.Tensor:
        """The value itself."""
        return moved

    def forget(self) -> None:
        """Nothing is under way."""


@dataclass
class _Moved:
    """A value in pinned memory; on its way, also where it came from or goes to, and the event after the copy."""

    meta: TensorMeta
    host: torch.Tensor
    source: torch.Tensor | None
    done: torch.cuda.Event
    landing: Landing | None = None


class CudaMover:
    """Between one GPU and pinned memory, over a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def leave(self, value: torch.Tensor) -> _Moved:
        """Copy it away when the current stream has made it; its memory is held until `free`."""
        elements = packed(value)
        host = torch.empty(elements.shape, dtype=elements.dtype, pin_memory=True)
        return _Moved(meta_of(value), host, elements, self._copy(host, elements))

    def free(self, moved: _Moved) -> None:
        """The current stream waits for the copy; what it allocates from now on may take the memory."""
        torch.cuda.current_stream(self._device).wait_event(moved.done)
        moved.source = None

    def start(self, moved: _Moved) -> None:
        """Into memory of the current stream, when that has come here."""
        moved.landing = Landing.of(moved.meta, self._device)
        moved.done = self._copy(moved.landing.elements, moved.host)

    def arrive(self, moved: _Moved) -> torch.Tensor:
        """The current stream waits for the copy."""
        assert moved.landing is not None, "a value was asked for before it came back"
        torch.cuda.current_stream(self._device).wait_event(moved.done)
        return moved.landing.value()

    def forget(self) -> None:
        """What the current stream does next with the memory comes after the copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(self._stream)
        return done


def mover_for(device: torch.device) -> Mover[Any]:
    """What moves values off a device."""
    return CudaMover(device) if device.type == "cuda" else Staying()


def frees(device: torch.device) -> bool:
    """Whether what leaves a device leaves its memory."""
    return device.type != "cpu"


@dataclass
class _Journey(Generic[K]):
    """A trip in a step: the values that are away, by name."""

    trip: OffloadWindow
    away: dict[str, K] = field(default_factory=dict)


class Offloader(Generic[K]):
    """Moves the saved values of one rank's stages during its steps."""

    def __init__(self, trips: Iterable[OffloadWindow], stages: Mapping[int, GraphStage], mover: Mover[K]) -> None:
        self._stages, self._mover = stages, mover
        self._journeys = [_Journey[K](trip) for trip in trips if trip.stage in stages]
        self._after_forward = self._by(lambda trip: Action(trip.stage, Kind.F, trip.microbatch))
        self._at_gone = self._by(lambda trip: trip.evict_after)
        self._at_back = self._by(lambda trip: trip.prefetch_at)
        self._at_reader = self._by(lambda trip: trip.first_use)

    def _by(self, when: Callable[[OffloadWindow], Action]) -> dict[Action, list[_Journey[K]]]:
        found: dict[Action, list[_Journey[K]]] = defaultdict(list)
        for journey in self._journeys:
            found[when(journey.trip)].append(journey)
        return dict(found)

    def before(self, action: Action) -> None:
        """Called before a computing action of the rank runs."""
        if not self._journeys:
            return
        for journey in self._at_back.get(action, ()):
            for moved in journey.away.values():
                self._mover.start(moved)
        for leaf in action.leaves:
            for journey in self._at_reader.get(leaf, ()):
                held = self._held(journey)
                held.update((name, self._mover.arrive(moved)) for name, moved in journey.away.items())
                journey.away.clear()

    def after(self, action: Action) -> None:
        """Called when a computing action of the rank has run."""
        if not self._journeys:
            return
        for journey in self._at_gone.get(action, ()):
            for moved in journey.away.values():
                self._mover.free(moved)
        for leaf in action.leaves:
            for journey in self._after_forward.get(leaf, ()):
                held = self._held(journey)
                journey.away = {name: self._mover.leave(held.pop(name)) for name in journey.trip.values}

    def drop(self) -> None:
        """Forget a step that failed."""
        if any(journey.away for journey in self._journeys):
            self._mover.forget()
        for journey in self._journeys:
            journey.away.clear()

    def _held(self, journey: _Journey[K]) -> dict[str, torch.Tensor]:
        return self._stages[journey.trip.stage].held(journey.trip.microbatch)
