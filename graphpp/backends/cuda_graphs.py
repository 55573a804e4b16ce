"""Replay a stage program as a CUDA graph: one launch for the whole program instead of one per operation.

Contract
--------
- A `ReplayedProgram` replaces a program's `run`, with the same arguments and results. The first `WARM_UPS` runs execute eagerly
  on the recorder's stream, the next run is recorded, later runs replay it.
- Parameters, buffers and constants are read in place. All other arguments are copied into static memory. If an argument
  changes its shape, strides or dtype, or an argument read in place its address, the program is recorded again, at most
  `RECORDINGS` times.
- Every result is copied out of the recording's memory. So no replay overwrites live values: saved values of other microbatches,
  messages in flight, gradients. This also lets all recordings of a rank share one memory pool, replayed in any order. The cost:
  one more copy of one microbatch's values per program, and two copies of each saved value (from the forward, to the backward).
- After the replay, gradients go to the gradient sink in the program's order. A gradient given as two factors of a matrix
  product is multiplied into its sum directly from the recording's memory.
- A program that cannot be recorded runs without a graph; `ReplayedProgram.describe` and one log line give the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpp.runtime import program as roles
from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout
from graphpp.runtime.gradients.gradient_sink import GradientSink, ReturningSink
from graphpp.runtime.messages.wire_layout import ReceiveBuffer, buffer_like, copy_all, copy_elements
from graphpp.runtime.program import Program
from graphpp.streams import SideStream

WARM_UPS = 2
RECORDINGS = 8

_IN_PLACE = (roles.Parameter, roles.Buffer, roles.Constant)
_COPIED = (roles.Input, roles.Seed, roles.Received, roles.Saved)

_LOG = logging.getLogger("graphpp")


class CudaGraphRecorder:
    """Records the CUDA graphs of one rank into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = SideStream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Run on the recording stream: libraries keep one workspace per stream, which the warm-up allocates."""
        with self._stream.in_place_of_current():
            return run()

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Capture in thread-local mode, as other threads (NCCL's watchdog, data loaders) may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, self._pool, self._stream.stream, capture_error_mode="thread_local")
        with torch.cuda.device(self.device), capturing:
            results = run()
        return graph.replay, results


@dataclass
class RecordingSink:
    """The gradient sink of a program during recording."""

    order: list[tuple[int, bool, MatmulLayout | None]] = field(default_factory=list)  # result index, given as factors?, layout
    factors: list[torch.Tensor] = field(default_factory=list)  # two per matrix product

    def __call__(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Note a gradient that is a result of the program."""
        self.order.append((index, False, None))
        return value

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> None:
        """Note a gradient given as two factors; it is no result, and is multiplied after each replay."""
        self.order.append((index, True, layout))
        self.factors += (a, b)


@dataclass(frozen=True)
class _Recording:
    """A recorded run.

    `key`: the recording is valid for it (see `_key`). `buffers`: static memory of copied arguments. `results`: static memory of
    results, None for gradients given as factors. `gradients`: the order of gradients, and static memory of their factors.
    """

    key: tuple[object, ...]
    buffers: Sequence[ReceiveBuffer]
    replay: Callable[[], None]
    results: Sequence[torch.Tensor | None]
    gradients: RecordingSink

    def copy_results(self) -> list[Any]:
        copies = iter(copy_all([result for result in self.results if result is not None]))
        return [None if result is None else next(copies) for result in self.results]


class ReplayedProgram:
    """The `run` of a recorded program. `obstacle`: why the program can never be recorded."""

    def __init__(self, program: Program, recorder: CudaGraphRecorder, obstacle: str | None = None) -> None:
        self._program, self._recorder = program, recorder
        self._in_place = [index for index, role in enumerate(program.inputs) if isinstance(role, _IN_PLACE)]
        self._copied = [index for index, role in enumerate(program.inputs) if isinstance(role, _COPIED)]
        self._has_gradients = any(isinstance(role, roles.Gradient) for role in program.outputs)
        self._runs = self._recordings = 0
        self._recording: _Recording | None = None
        self.reason = obstacle or self._unknown()

    @property
    def name(self) -> str:
        return program_name(self._program)

    def describe(self) -> str:
        """The state: "replayed", "not recorded yet", or "not replayed: " and the reason."""
        if self.reason is not None:
            return f"not replayed: {self.reason}"
        return "not recorded yet" if self._recording is None else "replayed"

    def __call__(self, arguments: list[Any], sink: GradientSink | None = None) -> Sequence[Any]:
        """Run the program, record it, or replay its recording; same arguments and results as `Program.run`."""
        if self.reason is None and self._runs >= WARM_UPS:
            self._prepare(arguments)
        if self.reason is not None:
            return self._run(arguments, sink)
        if self._recording is not None:
            return self._replay(self._recording, arguments, sink)
        self._runs += 1
        return self._recorder.warm_up(lambda: self._run(arguments, sink))

    def _run(self, arguments: list[Any], sink: GradientSink | None) -> Sequence[Any]:
        return self._program.run(arguments) if sink is None else self._program.run(arguments, sink)

    def _unknown(self) -> str | None:
        """The reason if an argument can be neither read in place nor copied: a recording would freeze its value."""
        known = {*self._in_place, *self._copied}
        strange = [role for index, role in enumerate(self._program.inputs) if index not in known]
        if roles.RandomKey() in strange:
            return "it draws random numbers from a key that the host knows"
        return f"it is given {strange[0]}" if strange else None

    def _prepare(self, arguments: Sequence[Any]) -> None:
        """Record the program unless a recording is valid for these arguments; set `reason` if it cannot be recorded."""
        self.reason = self._unfit(arguments)
        if self.reason is None:
            key = self._key(arguments)
            if self._recording is None or self._recording.key != key:
                self._record(arguments, key)
        if self.reason is not None:
            self._recording = None
            _LOG.warning("cudagraphs: %s is run without a graph: %s", self.name, self.reason)

    def _unfit(self, arguments: Sequence[Any]) -> str | None:
        """The reason if an argument is no plain tensor on this device."""
        for value, role in zip(arguments, self._program.inputs, strict=True):
            if not isinstance(value, torch.Tensor):
                return f"{role} is a {type(value).__name__}"
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return f"{role} is a {type(value).__name__}, whose memory is not its own"
            if value.device != self._recorder.device:
                return f"{role} is on {value.device}"
        return None

    def _key(self, arguments: Sequence[Any]) -> tuple[object, ...]:
        """The addresses of arguments read in place; the shapes, strides and dtypes of all arguments."""
        addresses = (arguments[at].data_ptr() for at in self._in_place)
        return (*addresses, *((each.shape, each.stride(), each.dtype) for each in arguments))

    def _record(self, arguments: Sequence[Any], key: tuple[object, ...]) -> None:
        """Record the program; set `reason` if CUDA refuses or after `RECORDINGS` recordings."""
        self._recordings, self._recording = self._recordings + 1, None
        if self._recordings > RECORDINGS:
            self.reason = f"its parameters were moved, or its arguments changed, {RECORDINGS} times"
            return
        in_place = {at: arguments[at].detach() for at in self._in_place}
        buffers = {at: buffer_like(arguments[at]) for at in self._copied}
        copy_elements(list(buffers.values()), [arguments[at] for at in self._copied])

        sinks: list[RecordingSink] = []

        def run() -> Sequence[Any]:
            sinks.append(RecordingSink())
            inputs = {**in_place, **{at: buffer.value() for at, buffer in buffers.items()}}
            ordered = [inputs[at] for at in range(len(self._program.inputs))]
            results = self._run(ordered, sinks[-1] if self._has_gradients else None)
            return [*results, *sinks[-1].factors]

        try:
            replay, memory = self._recorder.record(run)
        except RuntimeError as error:
            self.reason = f"CUDA could not record it: {str(error).partition(chr(10))[0]}"
            return
        count, order = len(self._program.outputs), sinks[0].order
        results, gradients = memory[:count], RecordingSink(order, list(memory[count:]))
        as_factors = {index for index, is_product, _ in order if is_product}
        if not all(isinstance(result, torch.Tensor) or index in as_factors for index, result in enumerate(results)):
            self.reason = "a result is no tensor"
            return
        self._recording = _Recording(key, list(buffers.values()), replay, results, gradients)

    def _replay(self, recording: _Recording, arguments: list[Any], sink: GradientSink | None) -> list[Any]:
        copy_elements(recording.buffers, [arguments[at] for at in self._copied])
        arguments.clear()
        recording.replay()
        results, sink = recording.copy_results(), ReturningSink() if sink is None else sink
        factors = iter(recording.gradients.factors)
        for index, is_product, layout in recording.gradients.order:
            if is_product:
                results[index] = sink.matmul(index, next(factors), next(factors), layout)
            else:
                results[index] = sink(index, results[index])
        return results


def program_name(program: Program) -> str:
    """The stage and phase of a program, for messages."""
    return f"stage {program.stage} {program.phase.label}"
