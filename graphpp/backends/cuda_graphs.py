"""Record functions of tensors as CUDA graphs of one memory pool: a replay is one launch for all kernels of a function.

Contract
--------
- `record` captures a function and launches the graph once. A `Recording` launches it for the arguments of later runs.
- Arguments in place keep their address: parameters, buffers, constants, and results of earlier recordings. All others are
  copied into memory of the pool.
- A recording does not keep its results allocated. Where a recorded step frees a value, later captures of that step take its
  memory, so a replay overwrites the value there. Hence: recordings are replayed in the order in which they were captured, all
  of them in one order, on one stream; a value is read where the recorded step held it; and no value outlives its step.
- `CudaGraphRecorder.owns` tells values in memory of the pool; `copies_of` copies such values out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpp._torch.distributed import close_pool, without_owning
from graphpp.runtime.messages.wire_layout import ReceiveBuffer, buffer_like, copy_all, copy_elements
from graphpp.streams import SideStream, wait_for_device

Results = list[torch.Tensor | None]
Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype]  # of an argument: address, 0 for a copied one; shape, strides, dtype
Function = Callable[[list[Any]], Results]  # takes its arguments out of the list


class CudaGraphRecorder:
    """Captures the CUDA graphs of one rank into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = SideStream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = None  # torch drops a pool for good when its last graph is gone
        self._addresses: set[int] = set()  # of memory in the pool
        self._failed: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Run on the recording stream: libraries keep one workspace per stream, which the warm-up allocates."""
        with self._stream.in_place_of_current():
            return run()

    def prepare(self) -> None:
        """Called before the captures of a step: hands cached memory back, for the pool."""
        wait_for_device(self.device)
        torch.cuda.empty_cache()
        if self._anchor is None:
            self._anchor = self._captured(lambda: torch.zeros(1, device=self.device))[0]

    def capture(
        self, run: Function, arguments: list[Any], copied: Sequence[int]
    ) -> tuple[list[ReceiveBuffer], Callable[[], None], Results]:
        """Capture `run(arguments)`: (the memory for the arguments `copied`, the launch, the results before any launch).

        The list `arguments` is emptied. Raises `RuntimeError` if CUDA refuses.
        """
        outside = {address_of(value) for value in arguments if not self.owns(value)}
        graph, (into, results) = self._captured(lambda: (static_inputs(arguments, copied, without_owning), run(arguments)))
        self._addresses |= {address_of(result) for result in results if result is not None and self._is_here(result)} - outside
        return into, graph.replay, results

    def _captured(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture in thread-local mode, as other threads (NCCL's watchdog, data loaders) may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream.stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                made = run()
                graph.capture_end()
            except BaseException:
                self._failed.append(graph)  # torch may refer to it until its capture has ended
                with contextlib.suppress(RuntimeError):  # the first error is the reason
                    graph.capture_end()
                close_pool(self._pool)
                raise
        return graph, made

    def owns(self, value: torch.Tensor) -> bool:
        """Whether a value is in memory of the pool, which a later replay may overwrite."""
        return address_of(value) in self._addresses

    def alias(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor with the same memory that does not keep it allocated."""
        return without_owning(value) if self._is_here(value) else value

    def _is_here(self, value: torch.Tensor) -> bool:
        """False for values that an operator leaves in the host's memory, such as the seeds of attention without dropout."""
        return value.device == self.device


def address_of(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def static_inputs(
    arguments: list[Any], copied: Sequence[int], alias: Callable[[torch.Tensor], torch.Tensor]
) -> list[ReceiveBuffer]:
    """Replace the arguments `copied` by newly allocated ones; returns buffers that do not keep their memory allocated.

    All buffers are filled before a launch, so none is freed before all are allocated.
    """
    buffers = [buffer_like(arguments[at]) for at in copied]
    for at, buffer in zip(copied, buffers, strict=True):
        arguments[at] = buffer.value()
    elements = [alias(each.elements) for each in buffers]
    return [ReceiveBuffer(own, own, each.layout) for own, each in zip(elements, buffers, strict=True)]


@dataclass(frozen=True)
class Recording:
    """A captured function. `keys`: of the arguments that it fits; `copied`: the indices of copied ones, `into` their memory.

    `known`: the last arguments by index, for those in memory of the pool: replays give the same tensors again.
    """

    keys: Sequence[Key]
    copied: Sequence[int]
    into: Sequence[ReceiveBuffer]
    launch: Callable[[], None]
    results: Results
    known: dict[int, torch.Tensor | None]

    def fits(self, arguments: Sequence[torch.Tensor]) -> bool:
        for at, (value, key) in enumerate(zip(arguments, self.keys, strict=True)):
            if value is self.known.get(at, self):
                continue
            if key != _key(value, moves=key[0] == 0):
                return False
            if at in self.known:
                self.known[at] = value
        return True

    def replay(self, arguments: list[torch.Tensor]) -> Results:
        """The results for these arguments, which are taken out of their list; valid until a later replay overwrites them."""
        copy_elements(self.into, [arguments[at] for at in self.copied])
        arguments.clear()
        self.launch()
        return list(self.results)


def record(
    recorder: CudaGraphRecorder, run: Function, arguments: list[Any], in_place: Collection[int]
) -> tuple[Recording, Results]:
    """Capture and launch `run`; the results, unlike those of a replay, keep their memory allocated.

    `in_place`: the indices of arguments that keep their address. Raises `RuntimeError` if CUDA refuses; `arguments` is empty
    then.
    """
    copied = {at: value for at, value in enumerate(arguments) if at not in in_place and not recorder.owns(value)}
    keys = [_key(value, moves=at in copied) for at, value in enumerate(arguments)]
    known = dict.fromkeys(at for at, value in enumerate(arguments) if recorder.owns(value))
    into, launch, results = recorder.capture(run, arguments, list(copied))
    aliases = [None if result is None else recorder.alias(result) for result in results]
    copy_elements(into, list(copied.values()))
    launch()
    return Recording(keys, list(copied), into, launch, aliases, known), results


def _key(value: torch.Tensor, *, moves: bool) -> Key:
    """The facts of an argument for which a recording holds: address (0 for a copied argument), shape, strides, dtype."""
    return 0 if moves else value.data_ptr(), value.shape, value.stride(), value.dtype


def copies_of(recorder: CudaGraphRecorder, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values, with copies in place of those in memory of the pool."""
    copies = iter(copy_all([value for value in values if recorder.owns(value)]))
    return [next(copies) if recorder.owns(value) else value for value in values]
