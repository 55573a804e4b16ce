"""A runner's steps as CUDA graphs: one for the whole step, or one for each task (stage, phase and microbatch).

Contract
--------
- After `WARM_UPS` steps on the recorder's stream, one step is recorded and later steps replay it. A `WholeStep` is one graph.
  Else each task is one: a runner runs the same tasks in the same order in every step. A saved value, and a value for a stage
  on the same rank, stays in memory of the graphs, which is reused as the recorded step frees it.
- Copied out of that memory: outputs, losses, metrics (`Task.file`), messages to other ranks (`StepGraphs.own`), gradients that
  become a sum (`Accumulator`). No value of it outlives the step. Copied into it: all arguments that no recorded task made.
- Gradients go to the sink after the replay, in the program's order. A gradient given as two factors of a matrix product is
  multiplied into its sum directly from the graphs' memory.
- A program that cannot be recorded runs without a graph, between replays; then no step is one graph. If arguments of a task
  changed, the rest of the step runs without graphs and the next step records again. After `RECORDINGS` recordings there are no
  graphs any more. `RecordedPrograms.states` and the log say why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from graphpp.backends.cuda_graphs import CudaGraphRecorder, Recording, Results, copies_of, record
from graphpp.log import logger
from graphpp.passes.graph.cuda_graph_obstacles import COMPUTES_NOTHING, cuda_graph_obstacle
from graphpp.passes.provenance import ProgramGraphs
from graphpp.runtime import program as roles
from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout
from graphpp.runtime.gradients.gradient_sink import GradientSink, ReturningSink
from graphpp.runtime.program import PipelineProgram, Program, StageProgram
from graphpp.runtime.whole_step import Place, WholeStep

WARM_UPS = 1
RECORDINGS = 8

_IN_PLACE = (roles.Parameter, roles.Buffer, roles.Constant, roles.StepInvariant)
_KNOWN = (*_IN_PLACE, roles.Input, roles.Seed, roles.Received, roles.Saved)
_LOG = logger(__name__)
_NOWHERE = "only CUDA devices have such graphs"


class Mode(Enum):
    """The way in which the tasks of a step run."""

    PLAIN = "run"
    WARM_UP = "run on the recorder's stream"
    RECORD = "record"
    REPLAY = "replay"


class StepGraphs:
    """The recordings of one runner. `reasons`: by `id` of a program, why it runs without a graph."""

    def __init__(self, recorder: CudaGraphRecorder, reasons: Mapping[int, str]) -> None:
        self.recorder, self.reasons, self.mode = recorder, dict(reasons), Mode.PLAIN
        self._tasks: list[RecordedTask] = []
        self._whole: dict[object, tuple[Recording, Sequence[Place]]] = {}
        self._warm_ups = self._recordings = 0
        self._recorded, self._takes_whole = False, True  # whether all tasks are recorded; whether whole steps may be

    def task(self, program: Program) -> RecordedTask:
        """A function with the arguments and results of `program.run`, for one microbatch."""
        self._tasks.append(RecordedTask(self, program))
        return self._tasks[-1]

    def owns(self, value: torch.Tensor) -> bool:
        """Whether a later replay overwrites a value."""
        return self.recorder.owns(value)

    def own(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values, with copies in place of those that a later replay overwrites."""
        return copies_of(self.recorder, values)

    def run_step(self, run: Callable[[], None], whole: Callable[[], WholeStep] | None) -> None:
        """Run the tasks of a step by `run`, or all of them as one graph, if `whole` makes them one function."""
        warm = self._warm_ups >= WARM_UPS
        refused = any(self.reasons.get(id(task.program)) not in (None, COMPUTES_NOTHING) for task in self._tasks)
        if warm and self._takes_whole and not refused and whole is not None and self._run_whole(whole()):
            return
        self.mode = (Mode.REPLAY if self._recorded else Mode.RECORD) if warm else Mode.WARM_UP
        if self.mode is Mode.RECORD and self._may_record():
            for task in self._tasks:
                task.recording = None
        elif self.mode is Mode.RECORD:
            self.mode = Mode.PLAIN
        try:
            run()
            self._warm_ups += not warm
            self._recorded = self.mode in (Mode.RECORD, Mode.REPLAY)
        finally:
            self.mode = Mode.PLAIN

    def _run_whole(self, step: WholeStep) -> bool:
        """Record or replay a step as one graph; False if this cannot be, and the step has still to run."""
        recording, places = self._whole.get(step.key, (None, ()))
        if any(_unfit(value, self.recorder.device) for value in step.arguments):
            self._takes_whole = False
            return False
        if recording is not None and recording.fits(step.arguments):
            results = recording.replay(step.arguments)
        elif not self._may_record():
            return False
        else:
            try:
                recording, results = record(self.recorder, step.run, step.arguments, step.in_place)
            except RuntimeError as error:
                _LOG.warning("cudagraphs: each task is a graph of its own, as CUDA could not record the step as one: %s", error)
                self._takes_whole = False
                step.begin()
                return False
            places = step.places
            self._whole[step.key] = recording, places
        step.finish(places, results, self.own)
        return True

    def _may_record(self) -> bool:
        """Whether another recording is allowed, which then begins; else every program runs without a graph from now on."""
        self._recordings += 1
        if self._recordings <= RECORDINGS:
            self.recorder.prepare()
            return True
        reason = f"its parameters were moved, or its arguments changed, {RECORDINGS} times"
        found = {id(task.program) for task in self._tasks} - self.reasons.keys()
        if found:
            self.reasons.update(dict.fromkeys(found, reason))
            _LOG.warning("cudagraphs: from now on every program is run without a graph: %s", reason)
        return False

    def abandon(self) -> None:
        """Run the rest of the step without graphs, since an argument changed; values in the graphs' memory stay as they are."""
        self.mode = Mode.PLAIN
        self._recorded = False

    def refuse(self, program: Program, reason: str) -> None:
        """From now on, run a program without a graph."""
        if self.reasons.setdefault(id(program), reason) is reason:
            _LOG.warning("cudagraphs: %s is run without a graph: %s", program_name(program), reason)

    def state_of(self, program: Program) -> str:
        """The state: "replayed", "not recorded yet", or "not replayed: " and the reason."""
        if id(program) in self.reasons:
            return f"not replayed: {self.reasons[id(program)]}"
        tasks = [task for task in self._tasks if task.program is program]
        recorded = any(task.recording if self._recorded else self._whole for task in tasks)
        return "replayed" if recorded else "not recorded yet"


@dataclass
class RecordingSink:
    """The gradient sink of a program during its capture."""

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


class RecordedTask:
    """The run of a program for one microbatch of a runner's step."""

    def __init__(self, graphs: StepGraphs, program: Program) -> None:
        self._graphs, self.program = graphs, program
        self._in_place = {index for index, role in enumerate(program.inputs) if isinstance(role, _IN_PLACE)}
        self._outputs = [index for index, role in enumerate(program.outputs) if isinstance(role, roles.Output)]
        self._has_gradients = any(isinstance(role, roles.Gradient) for role in program.outputs)
        self._order: list[tuple[int, bool, MatmulLayout | None]] = []
        self.recording: Recording | None = None

    def __call__(self, arguments: list[Any], sink: GradientSink | None = None) -> Sequence[Any]:
        """Run the program, record it, or replay its recording; same arguments and results as `Program.run`."""
        graphs = self._graphs
        if graphs.mode is Mode.PLAIN or id(self.program) in graphs.reasons:
            return self._run(arguments, sink)
        if graphs.mode is Mode.WARM_UP:
            return graphs.recorder.warm_up(lambda: self._run(arguments, sink))
        if graphs.mode is Mode.RECORD:
            return self._record(arguments, sink)
        if self.recording is None or not self.recording.fits(arguments):
            graphs.abandon()
            return self._run(arguments, sink)
        return self._hand_over(self.recording.replay(arguments), sink)

    def _run(self, arguments: list[Any], sink: GradientSink | None) -> Sequence[Any]:
        return self.program.run(arguments) if sink is None else self.program.run(arguments, sink)

    def _record(self, arguments: list[Any], sink: GradientSink | None) -> Sequence[Any]:
        recorder, pairs = self._graphs.recorder, zip(arguments, self.program.inputs, strict=True)
        reason = next((f"{role} {why}" for value, role in pairs if (why := _unfit(value, recorder.device))), None)
        if reason is None:
            again = [recorder.alias(value) if recorder.owns(value) else value for value in arguments]
            try:
                self.recording, results = record(recorder, self._captured, arguments, self._in_place)
                return self._hand_over(results, sink)
            except RuntimeError as error:
                reason, arguments = f"CUDA could not record it: {str(error).partition(chr(10))[0]}", again
        self._graphs.refuse(self.program, reason)
        return self._run(arguments, sink)

    def _captured(self, arguments: list[Any]) -> Results:
        """Run the program; the results, None for gradients given as factors, and after them the factors."""
        sink = RecordingSink()
        results = self._run(arguments, sink if self._has_gradients else None)
        as_factors = {index for index, is_product, _ in sink.order if is_product}
        if not all(isinstance(result, torch.Tensor) or index in as_factors for index, result in enumerate(results)):
            raise RuntimeError("a result is no tensor")
        self._order = sink.order
        return [*results, *sink.factors]

    def _hand_over(self, made: Results, sink: GradientSink | None) -> list[Any]:
        """The results of the program, once the sink has the gradients."""
        sink, count = ReturningSink() if sink is None else sink, len(self.program.outputs)
        results, factors = made[:count], iter(made[count:])
        for index, is_product, layout in self._order:
            if is_product:
                results[index] = sink.matmul(index, next(factors), next(factors), layout)  # type: ignore[arg-type]
            else:
                results[index] = sink(index, results[index])  # type: ignore[arg-type]
        for index in self._outputs:
            (results[index],) = self._graphs.own([results[index]])  # type: ignore[list-item]
        return results


class RecordedPrograms:
    """The recordings of one pipeline on this rank. With `recorder=None` all programs run without a graph."""

    def __init__(self, recorder: CudaGraphRecorder | None) -> None:
        self._recorder = recorder
        self._told = False
        self._states: list[tuple[str, Callable[[], str]]] = []  # a program's name, and a function that returns its state

    @property
    def states(self) -> dict[str, str]:
        """The state of each program of the last runner, by stage and phase; one entry per microbatch shape."""
        seen: Counter[str] = Counter()
        states: dict[str, str] = {}
        for name, state in self._states:
            seen[name] += 1
            states[name + (f", graph {seen[name]}" if seen[name] > 1 else "")] = state()
        return states

    def of_step(
        self, programs: Sequence[PipelineProgram], local: Collection[int], sources: ProgramGraphs
    ) -> StepGraphs | None:
        """The recordings for a new runner of these programs, of whose stages `local` are this rank's."""
        stages = list({id(stage): stage for each in programs for stage in each.stages if stage.index in local}.values())
        items = list({id(item): item for stage in stages for item in stage.programs.values()}.values())
        recorder = self._recorder
        if recorder is None:
            self._states = [(program_name(item), lambda: f"not replayed: {_NOWHERE}") for item in items]
            self._tell([f"all programs: {_NOWHERE}"])
            return None
        found = {key: reason for stage in stages for key, reason in _obstacles(stage, recorder, sources).items()}
        graphs = StepGraphs(recorder, {key: reason for key, reason in found.items() if reason is not None})
        self._states = [(program_name(item), lambda item=item: graphs.state_of(item)) for item in items]  # type: ignore[misc]
        told = [item for item in items if found[id(item)] not in (None, COMPUTES_NOTHING)]
        self._tell([f"{program_name(item)}: {found[id(item)]}" for item in told])
        return graphs

    def _tell(self, reasons: list[str]) -> None:
        if reasons and not self._told:
            _LOG.warning("backend: cudagraphs=True, but these run without a graph: %s", "; ".join(reasons))
        self._told = self._told or bool(reasons)


def _unfit(value: Any, device: torch.device) -> str:
    """Why an argument cannot be one of a recording: it is no plain tensor on this device. Empty if it can."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(value).__name__}, no tensor with memory of its own"
    return "" if value.device == device else f"is on {value.device}"


def _obstacles(stage: StageProgram, recorder: CudaGraphRecorder, sources: ProgramGraphs) -> dict[int, str | None]:
    """By `id` of a stage's program, the reason not to record it."""
    found = {id(item): _obstacle(item, recorder, sources) for item in stage.programs.values()}
    if stage.hoisted is not None:
        reason = found[id(stage.hoisted)] = _obstacle(stage.hoisted, recorder, sources)
        for item in stage.programs.values() if reason not in (None, COMPUTES_NOTHING) else ():
            if any(isinstance(role, roles.StepInvariant) for role in item.inputs):
                found[id(item)] = f"it reads values that are computed once a step without a graph: {reason}"
    return found


def _obstacle(item: Program, recorder: CudaGraphRecorder, sources: ProgramGraphs) -> str | None:
    """The reason not to record a program, as far as it is known before the program runs."""
    strange = [role for role in item.inputs if not isinstance(role, _KNOWN)]
    if roles.RandomKey() in strange:
        return "it draws random numbers from a key that the host knows"
    if strange:
        return f"it is given {strange[0]}"  # a recording would freeze its value
    return cuda_graph_obstacle(sources.of(item).graph, recorder.device.type)


def recorder_for(device: torch.device) -> CudaGraphRecorder | None:
    return CudaGraphRecorder(device) if device.type == "cuda" else None


def program_name(program: Program) -> str:
    """The stage and phase of a program, for messages."""
    return f"stage {program.stage} {program.phase.label}"
