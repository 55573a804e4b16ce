"""Replay a stage program as a CUDA graph: one launch for the whole program in place of one launch per operation.

Contract
--------
- `with_cuda_graph(program, recorder)` returns a `Program` with the same roles and the same numbers; its `run` is a
  `ReplayedProgram`. The first `WARM_UPS` runs execute the program itself, on the recorder's stream. The next run is recorded,
  and every later run replays the recording.
- Parameters, buffers and constants are read in place. All other arguments are copied into memory that the recording reads. If
  a copied argument changes its shape or strides, or an argument that is read in place changes its address, the program is
  recorded again, at most `RECORDINGS` times.
- Every result is copied out of the recording's memory into memory of its own. A later replay, of this or of any other
  program, therefore overwrites nothing that is alive: no saved values of other microbatches, no messages in flight, no
  gradients. For the same reason all recordings of a rank share one memory pool, in whatever order they are replayed. The
  price: each program keeps one more copy of one microbatch's values, and each saved value is copied twice, out of the
  forward's recording and into the backward's.
- Gradients go to the gradient sink after the replay, in the order in which the program itself hands them over. A gradient
  that the program hands over as two factors of a matrix product is multiplied into its sum straight from the recording's
  memory.
- A program that cannot be recorded runs without a graph; `ReplayedProgram.describe` and one line of the log say why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from graphpp.runtime import program as roles
from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout
from graphpp.runtime.gradients.gradient_sink import GradientSink, ReturningSink
from graphpp.runtime.program import Program
from graphpp.runtime.strided_copies import buffer_like, copy_all, copy_elements
from graphpp.runtime.transport import ReceiveBuffer

WARM_UPS = 2
RECORDINGS = 8

Results = Sequence[Any]
_IN_PLACE = (roles.Parameter, roles.Buffer, roles.Constant)
_COPIED = (roles.Input, roles.Seed, roles.Received, roles.Saved)

_LOG = logging.getLogger("graphpp")


class GraphRecorder(Protocol):
    """The device's part: streams, graphs and their pool."""

    device: torch.device

    def warm_up(self, run: Callable[[], Results]) -> Results:
        """Run, where recordings are made, and let what comes after wait for it."""

    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """What replays `run`, and where its results are after each replay; nothing has run yet."""


class CudaGraphRecorder:
    """CUDA graphs of one rank, with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Results]) -> Results:
        """Run on the stream on which recordings are made: libraries keep workspaces for each stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = run()
        current.wait_stream(self._stream)
        return results

    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """Capture; other threads (NCCL's watchdog, data loaders) may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self.device), capturing:
            results = run()
        return graph.replay, results


@dataclass
class RecordingSink:
    """What a program hands out while it is recorded: gradients that stay results, and factors of products."""

    order: list[tuple[int, bool, MatmulLayout | None]] = field(default_factory=list)  # index, a product?, its layout
    factors: list[torch.Tensor] = field(default_factory=list)  # two of each product

    def __call__(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """It stays a result."""
        self.order.append((index, False, None))
        return value

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> None:
        """It is none."""
        self.order.append((index, True, layout))
        self.factors += (a, b)


@dataclass(frozen=True)
class _Recording:
    """A captured run: what it was recorded for, where its arguments go, where its results lie (None: handed out).

    `handed` says which gradients it hands out, in what order; the factors of products lie where its own say.
    """

    key: tuple[object, ...]
    places: Sequence[ReceiveBuffer]
    replay: Callable[[], None]
    results: Sequence[torch.Tensor | None]
    handed: RecordingSink

    def copied(self) -> list[Any]:
        """Copies of the results."""
        made = iter(copy_all([result for result in self.results if result is not None]))
        return [None if result is None else next(made) for result in self.results]


class ReplayedProgram:
    """The `run` of a program that is replayed. `obstacle`: why it cannot be, where that is known beforehand."""

    def __init__(self, program: Program, recorder: GraphRecorder, obstacle: str | None = None) -> None:
        self._program, self._recorder = program, recorder
        self._in_place = [index for index, role in enumerate(program.inputs) if isinstance(role, _IN_PLACE)]
        self._copied = [index for index, role in enumerate(program.inputs) if isinstance(role, _COPIED)]
        self._hands = any(isinstance(role, roles.Gradient) for role in program.outputs)
        self._runs = self._recordings = 0
        self._recording: _Recording | None = None
        self.reason = obstacle or self._unknown()

    @property
    def name(self) -> str:
        """Stage and phase."""
        return program_name(self._program)

    def describe(self) -> str:
        """What a run does now: "replayed", "not recorded yet", or "not replayed: " and the reason."""
        if self.reason is not None:
            return f"not replayed: {self.reason}"
        return "not recorded yet" if self._recording is None else "replayed"

    def __call__(self, boxed: list[Any], take: GradientSink | None = None) -> Results:
        """Run as a `Program` does."""
        if self.reason is None and self._runs >= WARM_UPS:
            self._prepare(boxed)
        if self.reason is not None:
            return self._run(boxed, take)
        if self._recording is not None:
            return self._replayed(self._recording, boxed, take)
        self._runs += 1
        return self._recorder.warm_up(lambda: self._run(boxed, take))

    def _run(self, boxed: list[Any], take: GradientSink | None) -> Results:
        return self._program.run(boxed) if take is None else self._program.run(boxed, take)

    def _unknown(self) -> str | None:
        """Arguments that can be neither read in place nor copied: numbers of the host would stay as they were recorded."""
        known = {*self._in_place, *self._copied}
        strange = [role for index, role in enumerate(self._program.inputs) if index not in known]
        if roles.RandomKey() in strange:
            return "it draws random numbers from a key that the host knows"
        return f"it is given {strange[0]}" if strange else None

    def _prepare(self, boxed: Sequence[Any]) -> None:
        """Have a recording for these arguments, or a reason for having none."""
        self.reason = self._unfit(boxed)
        if self.reason is None:
            key = self._key(boxed)
            if self._recording is None or self._recording.key != key:
                self._record(boxed, key)
        if self.reason is not None:
            self._recording = None
            _LOG.warning("cudagraphs: %s is run without a graph: %s", self.name, self.reason)

    def _unfit(self, boxed: Sequence[Any]) -> str | None:
        for value, role in zip(boxed, self._program.inputs, strict=True):
            if not isinstance(value, torch.Tensor):
                return f"{role} is a {type(value).__name__}"
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return f"{role} is a {type(value).__name__}, whose memory is not its own"
            if value.device != self._recorder.device:
                return f"{role} is on {value.device}"
        return None

    def _key(self, boxed: Sequence[Any]) -> tuple[object, ...]:
        """What a recording takes for granted."""
        fixed = ((boxed[at].data_ptr(), boxed[at].shape, boxed[at].stride()) for at in self._in_place)
        return (*fixed, *((boxed[at].shape, boxed[at].stride(), boxed[at].dtype) for at in self._copied))

    def _record(self, boxed: Sequence[Any], key: tuple[object, ...]) -> None:
        self._recordings, self._recording = self._recordings + 1, None
        if self._recordings > RECORDINGS:
            self.reason = f"its parameters were moved, or its arguments changed, {RECORDINGS} times"
            return
        fixed = {at: boxed[at].detach() for at in self._in_place}
        places = {at: buffer_like(boxed[at]) for at in self._copied}
        copy_elements(list(places.values()), [boxed[at] for at in self._copied])

        made: list[RecordingSink] = []

        def run() -> Results:
            made.append(RecordingSink())
            arguments = {**fixed, **{at: place.value() for at, place in places.items()}}
            boxed = [arguments[at] for at in range(len(self._program.inputs))]
            results = self._run(boxed, made[-1] if self._hands else None)
            return [*results, *made[-1].factors]

        try:
            replay, memory = self._recorder.record(run)
        except RuntimeError as error:
            self.reason = f"CUDA could not record it: {str(error).partition(chr(10))[0]}"
            return
        count, order = len(self._program.outputs), made[0].order
        results, handed = memory[:count], RecordingSink(order, list(memory[count:]))
        given = {index for index, is_product, _ in order if is_product}
        if not all(isinstance(result, torch.Tensor) or index in given for index, result in enumerate(results)):
            self.reason = "a result is no tensor"
            return
        self._recording = _Recording(key, list(places.values()), replay, results, handed)

    def _replayed(self, recording: _Recording, boxed: list[Any], take: GradientSink | None) -> list[Any]:
        copy_elements(recording.places, [boxed[at] for at in self._copied])
        boxed.clear()
        recording.replay()
        results, taking = recording.copied(), ReturningSink() if take is None else take
        factors = iter(recording.handed.factors)
        for index, is_product, layout in recording.handed.order:
            if is_product:
                results[index] = taking.matmul(index, next(factors), next(factors), layout)
            else:
                results[index] = taking(index, results[index])
        return results


def program_name(program: Program) -> str:
    """Stage and phase, for people."""
    return f"stage {program.stage} {program.phase.label}"


def with_cuda_graph(program: Program, recorder: GraphRecorder, obstacle: str | None = None) -> Program:
    """The program, replayed as a graph as soon as it has been recorded."""
    return replace(program, run=ReplayedProgram(program, recorder, obstacle))
