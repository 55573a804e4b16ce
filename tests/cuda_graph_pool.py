"""CUDA graphs without CUDA: a recorder for the CPU whose memory is reused as that of a pool of graphs may be.

Contract: `Pool` knows when the step that recorded freed each value. A replay spoils (NaN, or -1) every value that was freed up
to that place of the step, since its results may lie there. The first replay of a step spoils all values, since none may outlive
a step. A replay reads its arguments in place, or in memory of its own. So a test fails if a value is read too late, if a value
that lives longer is not copied out, or if an argument is not copied in. `TracedPool` warms up on a side stream as on CUDA, for
a trace of `tests/device_trace.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphpp._torch.distributed import over
from graphpp.backends.cuda_graphs import CudaGraphRecorder, Function, Results
from graphpp.runtime.messages.wire_layout import ReceiveBuffer, buffer_like


@dataclass
class Memory:
    """Memory of one value: its bytes, and the storage over them that the recorded step held."""

    bytes: torch.Tensor
    holder: StorageWeakRef
    freed: bool = False

    def alias(self, like: torch.Tensor) -> torch.Tensor:
        return over(self.bytes.untyped_storage(), like)

    def spoil(self) -> None:
        self.bytes.fill_(255)


class Pool:
    """A `CudaGraphRecorder` for the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.recordings = self.replays = self.warm_ups = self.steps = 0
        self._memories: list[Memory] = []
        self._by_storage: dict[int, Memory] = {}  # the storage of a holder, or of the bytes themselves
        self._last = (0, 0)  # the number of the recorded step and of the recording that was replayed last

    def warm_up(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        self.warm_ups += 1
        return run()

    def prepare(self) -> None:
        self.steps += 1

    @property
    def held(self) -> int:
        """How many values the recorded steps still hold."""
        self._sweep()
        return sum(not memory.freed for memory in self._memories)

    def owns(self, value: torch.Tensor) -> bool:
        return value.untyped_storage()._cdata in self._by_storage

    def alias(self, value: torch.Tensor) -> torch.Tensor:
        memory = self._by_storage.get(value.untyped_storage()._cdata)
        return value if memory is None else memory.alias(value)

    def capture(
        self, run: Function, arguments: list[Any], copied: Sequence[int]
    ) -> tuple[list[ReceiveBuffer], Callable[[], None], Results]:
        self.recordings += 1
        number, before = (self.steps, self.recordings), self._sweep()
        outside = {value.untyped_storage()._cdata for value in arguments}
        static, own = self._static(arguments, copied)
        fixed = [None if at in static else self.alias(value) for at, value in enumerate(arguments)]
        written = [(value, value.clone()) for at, value in enumerate(arguments) if at not in static and not self.owns(value)]
        results, new = self._adopt(run(arguments), outside)
        after = self._sweep()
        for value, before_run in written:  # a capture writes nothing
            value.copy_(before_run)

        def replay() -> None:
            self.replays += 1
            kept = {id(memory) for _, memory in own}
            begins = number[0] != self._last[0] or number <= self._last
            for memory in self._memories if begins else before:
                if id(memory) not in kept:
                    memory.spoil()
            self._last = number
            values = [_value(static[at], static[at].elements) if at in static else each for at, each in enumerate(fixed)]
            made = run(values)
            for memory in after:
                memory.spoil()
            for index, memory in new:
                memory.bytes.copy_(_bytes(made[index].untyped_storage()))  # type: ignore[union-attr]

        for _, memory in (*own, *new):
            memory.spoil()
        return list(static.values()), replay, results

    def _static(
        self, arguments: list[Any], copied: Sequence[int]
    ) -> tuple[dict[int, ReceiveBuffer], list[tuple[int, Memory]]]:
        """Replace the arguments `copied` by values in memory of the pool; the buffers to copy into, and their memory."""
        buffers = [buffer_like(arguments[at]) for at in copied]
        elements, own = self._adopt(
            [buffer.elements.copy_(buffer.layout.pack(arguments[at])) for at, buffer in zip(copied, buffers, strict=True)]
        )
        for at, buffer, held in zip(copied, buffers, elements, strict=True):
            arguments[at] = _value(buffer, held)  # type: ignore[arg-type]
            buffer.elements = buffer.strided = self.alias(held)  # type: ignore[arg-type]
        return dict(zip(copied, buffers, strict=True)), own

    def _adopt(self, values: Results, outside: Collection[int] = ()) -> tuple[Results, list[tuple[int, Memory]]]:
        """The values in new memory of the pool, but for those in it or `outside`; for each memory, the index of a value."""
        holders: dict[int, torch.UntypedStorage] = {}
        made, first = Results(), list[tuple[int, Memory]]()
        for index, value in enumerate(values):
            key = 0 if value is None else value.untyped_storage()._cdata
            if value is None or key in outside or key in self._by_storage or not value.untyped_storage().nbytes():
                made.append(value)
                continue
            if key not in holders:
                holders[key] = self._memory(value.untyped_storage())
                first.append((index, self._memories[-1]))
            made.append(over(holders[key], value))
        return made, first

    def _memory(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A holder of new memory with the bytes of a storage."""
        copy = _bytes(storage).clone()
        array = (ctypes.c_uint8 * len(copy)).from_address(copy.data_ptr())
        holder = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        self._memories.append(Memory(copy, StorageWeakRef(holder)))
        self._by_storage[holder._cdata] = self._by_storage[copy.untyped_storage()._cdata] = self._memories[-1]
        return holder

    def _sweep(self) -> list[Memory]:
        """Memory that was freed since the last call."""
        found = [memory for memory in self._memories if not memory.freed and memory.holder.expired()]
        for memory in found:
            memory.freed = True
        return found


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload, no-any-return]


def _value(buffer: ReceiveBuffer, elements: torch.Tensor) -> torch.Tensor:
    """The value of a buffer whose elements have arrived in `elements`."""
    layout = buffer.layout
    if layout.dense:  # in the memory of the elements
        shape = [(layout.stored[at], layout.stride[at]) for at in range(len(layout.shape))]
        strided = elements.as_strided([size for size, _ in shape], [stride for _, stride in shape])
        return strided if layout.stored == layout.shape else strided.expand(layout.shape)
    fresh = layout.buffer(elements.device)
    fresh.elements.copy_(elements)
    return fresh.value()


class TracedPool(Pool):
    """Runs warm-ups as a `CudaGraphRecorder` does; made while a trace is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._on_cuda = CudaGraphRecorder(self.device)

    def warm_up(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        self.warm_ups += 1
        return self._on_cuda.warm_up(run)
