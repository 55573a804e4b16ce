"""Evicts saved values to the host's memory between their forward and backward, and prefetches them in time.

- An `OffloadWindow` names saved values of one stage's microbatch, and three computing actions of its rank. The copy to the host
  starts after the values' forward; after `evict_after` the device memory is free; before `prefetch_at` the copy back starts;
  before `first_use` the values are back. The plan decides the windows: the host never waits for the device.
- The runner calls `Offloader.before` and `after` around every computing action. Values come back with the same bits and
  strides.
- On CUDA the copies run on a side stream, to pinned memory. The compute stream waits for the copy to the host before the tensor
  is freed, so the caching allocator cannot reuse the memory too early. A copy back starts when the compute stream reaches
  `prefetch_at`, into memory allocated on the compute stream.
- On the CPU values stay where they are: there is no mover.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpp.runtime.messages.wire_layout import ReceiveBuffer, elements_of, layout_of, meta_of
from graphpp.runtime.program import TensorMeta
from graphpp.runtime.stage import GraphStage
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.streams import SideStream, host_memory_for


@dataclass
class _PinnedCopy:
    """A value in pinned memory. `done`: the event after the last copy.

    `source`: the device memory copied from, until freed; `buffer`: the device memory for the copy back, once prefetched.
    """

    meta: TensorMeta
    host: torch.Tensor
    source: torch.Tensor | None
    done: torch.cuda.Event
    buffer: ReceiveBuffer | None = None


class CudaMover:
    """Copies between one GPU and pinned memory, on a side stream: `evict`, `free`, `prefetch`, `restore` of each value."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, SideStream(device)

    def evict(self, value: torch.Tensor) -> _PinnedCopy:
        """Copy the value to the host as soon as the current stream has made it; its memory stays allocated until `free`."""
        elements = elements_of(value)
        host = host_memory_for(elements, pinned=True)
        return _PinnedCopy(meta_of(value), host, elements, self._copy(host, elements))

    def free(self, copy: _PinnedCopy) -> None:
        """Let the current stream wait for the copy; later allocations may take the memory."""
        self._stream.join(copy.done)
        copy.source = None

    def prefetch(self, copy: _PinnedCopy) -> None:
        """Copy the value back when the current stream reaches this point, into memory of the current stream."""
        copy.buffer = layout_of(copy.meta).buffer(self._device)
        copy.done = self._copy(copy.buffer.elements, copy.host)

    def restore(self, copy: _PinnedCopy) -> torch.Tensor:
        assert copy.buffer is not None, "a value was restored before it was prefetched"
        self._stream.join(copy.done)
        return copy.buffer.value()

    def abandon(self) -> None:
        """Let the current stream wait for all copies, so that it cannot reuse their memory before they end."""
        self._stream.join()

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        with self._stream.forked():
            into.copy_(source, non_blocking=True)
        return self._stream.mark()


def mover_for(device: torch.device) -> CudaMover | None:
    return CudaMover(device) if device.type == "cuda" else None


def eviction_frees_memory(device: torch.device) -> bool:
    return device.type != "cpu"


@dataclass
class _Eviction:
    """A window, and the copies of its evicted values by name."""

    window: OffloadWindow
    copies: dict[str, Any] = field(default_factory=dict)


class Offloader:
    """Evicts and prefetches the saved values of one rank's stages during its steps."""

    def __init__(self, windows: Iterable[OffloadWindow], stages: Mapping[int, GraphStage], mover: CudaMover | None) -> None:
        """Ignores `windows` of stages that are not among `stages`, this rank's, and all windows without a mover."""
        self._stages = stages
        self._mover: Any = mover
        self._evictions = [_Eviction(window) for window in windows if window.stage in stages and mover is not None]
        self._by_forward = self._by_action(lambda window: Action(window.stage, Kind.F, window.microbatch))
        self._by_evict_after = self._by_action(lambda window: window.evict_after)
        self._by_prefetch_at = self._by_action(lambda window: window.prefetch_at)
        self._by_first_use = self._by_action(lambda window: window.first_use)

    @property
    def evicts(self) -> bool:
        return bool(self._evictions)

    def _by_action(self, action_of: Callable[[OffloadWindow], Action]) -> dict[Action, list[_Eviction]]:
        found: dict[Action, list[_Eviction]] = defaultdict(list)
        for eviction in self._evictions:
            found[action_of(eviction.window)].append(eviction)
        return dict(found)

    def before(self, action: Action) -> None:
        """Called before a computing action: start prefetches, and restore the values that it reads."""
        for eviction in self._by_prefetch_at.get(action, ()):
            for copy in eviction.copies.values():
                self._mover.prefetch(copy)
        for eviction in _of_leaves(self._by_first_use, action):
            saved = self._saved_values(eviction)
            saved.update((name, self._mover.restore(copy)) for name, copy in eviction.copies.items())
            eviction.copies.clear()

    def after(self, action: Action) -> None:
        """Called after a computing action: free evicted values, and evict the values that it saved."""
        for eviction in self._by_evict_after.get(action, ()):
            for copy in eviction.copies.values():
                self._mover.free(copy)
        for eviction in _of_leaves(self._by_forward, action):
            saved = self._saved_values(eviction)
            eviction.copies = {name: self._mover.evict(saved.pop(name)) for name in eviction.window.values}

    def drop(self) -> None:
        """Forget the evicted values of a step that failed."""
        if self._evictions:
            self._mover.abandon()
        for eviction in self._evictions:
            eviction.copies.clear()

    def _saved_values(self, eviction: _Eviction) -> dict[str, torch.Tensor]:
        return self._stages[eviction.window.stage].saved_values(eviction.window.microbatch)


def _of_leaves(evictions: Mapping[Action, list[_Eviction]], action: Action) -> list[_Eviction]:
    return [eviction for leaf in action.leaves for eviction in evictions.get(leaf, ())]
