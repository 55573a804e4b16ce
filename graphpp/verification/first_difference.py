"""Find the first value, in execution order, in which a run of a step differs from the uncut joint graph.

- `first_in_stages` traces the stage programs line by line while the runner runs them, so it finds the place regardless of which
  pass, program or runtime part is wrong. Values are named as in the joint graph.
- `first_in_eager` hooks eager's module calls. A call differs if its input, or all of its outputs, have no equal (shape, dtype,
  bits) among the joint graph's values of that call. The difference names the nearest value.
- `first_in_results` is the fallback if only results differ: it names the result and the operation that makes it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from graphpp._torch import aot, pytree
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import PhaseKey, StagedGraphs
from graphpp.passes.text.naming import PythonNames
from graphpp.passes.text.render import format_role
from graphpp.runtime import program
from graphpp.runtime.parameter_rows import whole_name
from graphpp.runtime.program import Phase, PipelineProgram
from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.schedule import Schedule
from graphpp.verification.report import Comparison, Difference, FirstDifference, difference, same
from graphpp.verification.runs import Step, run_cut, run_eager, run_uncut

Values = Sequence[Mapping[str, Any]]  # per microbatch, the values of the joint graph by name
_PROGRAM = re.compile(r"<graphpp stage (\d+) (\w+)>.*")


def values_of(step: Step, joint: JointGraph) -> Values:
    """Run the uncut joint graph; returns all of its values by name, per microbatch."""
    values: list[Mapping[str, Any]] = []
    with step.restored():
        run_uncut(step, joint, lambda _, found: values.append(found))
    return values


def first_in_results(
    comparison: Comparison, joint: JointGraph, compiled: PipelineProgram | None = None
) -> FirstDifference | None:
    """The first unequal result, in the order in which the joint graph makes them."""
    order = {node: index for index, node in enumerate(joint.graph.nodes)}
    worst = "differs" if comparison.verdict == "differs" else "close"
    for role, node in sorted(joint.outputs(), key=lambda pair: order[pair[1]]):
        words, differences = _of_role(role, comparison)
        for microbatch, each in differences:
            if each.verdict == worst:
                return _first_difference(words, node, each, _stage_of(role, compiled), microbatch)
    return None


def first_not_finite(joint: JointGraph, values: Values) -> FirstDifference | None:
    """The first input, parameter or value of the joint graph with NaN, else with an infinite element."""
    for is_wrong in (torch.isnan, torch.isinf):
        for microbatch, known in enumerate(values):
            for node in joint.graph.nodes:
                if node.users and aot.rounds(value := known[node.name]) and is_wrong(value).any():
                    role = node.meta.get("role")
                    what = node.name if role is None else format_role(role)
                    return _first_difference(what, node, Difference(verdict="not finite"), None, microbatch)
    return None


def _of_role(role: program.OutputRole, comparison: Comparison) -> tuple[str, list[tuple[int | None, Difference]]]:
    """A result in words, with its differences by microbatch."""
    match role:
        case program.Loss():
            return "the loss", list(enumerate(comparison.losses))
        case program.Gradient(fqn):
            return f"the gradient of {fqn}", [(None, comparison.largest[whole_name(fqn)])]
        case program.BufferUpdate(fqn):
            return f"the buffer {fqn} after the step", [(None, comparison.buffers[fqn])]
    return "", []


def _stage_of(role: program.OutputRole, compiled: PipelineProgram | None) -> int | None:
    """The first stage whose programs make a result; None if no program does."""
    stages = compiled.stages if compiled is not None else ()
    return next((each.index for each in stages if any(role in item.outputs for item in each.programs.values())), None)


def first_line(function: Any) -> str:
    """`file:line` of the first line of a Python function; "" for other objects."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _first_difference(
    what: str, node: fx.Node, found: Difference, stage: int | None = None, microbatch: int | None = None
) -> FirstDifference:
    role = node.meta.get("role")
    calls = node.meta.get("calls") or (getattr(role, "fqn", ""),)
    return FirstDifference(what, calls[-1], node.meta.get("source", ""), found, node.name, stage, microbatch)


def first_in_stages(
    step: Step, values: Values, staged: StagedGraphs, programs: Sequence[PipelineProgram], schedule: Schedule
) -> FirstDifference | None:
    """The first value of a stage program that differs from the joint graph's, else None; `schedule` has one rank."""
    watcher = _Lines(values, staged, (leaf for _, _, action in schedule.cells() for leaf in action.leaves))
    before = sys.gettrace()
    with step.restored():
        sys.settrace(watcher.enter)
        try:
            run_cut(step, programs, schedule)
        finally:
            sys.settrace(before)
    return watcher.first


@dataclass
class _Lines:
    """A trace function (`sys.settrace`) that compares local variables of stage programs with `values`. `names`: text name ->
    node.
    """

    values: Values
    staged: StagedGraphs
    actions: Iterator[Action]
    first: FirstDifference | None = None
    names: dict[PhaseKey, dict[str, fx.Node]] = field(default_factory=dict)

    def enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Called by Python at each function call; calls of stage programs are the schedule's actions in order."""
        found = _PROGRAM.fullmatch(frame.f_code.co_filename)
        if found is None or found[2] == Phase.HOIST.label or frame.f_code.co_name != "run":
            return None
        action = next(self.actions)
        assert action.microbatch is not None
        key, microbatch, seen = (Phase[found[2].upper()], int(found[1])), action.microbatch, set[str]()

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            for name, value in frame.f_locals.items() if self.first is None else ():
                if name not in seen and isinstance(value, torch.Tensor):
                    seen.add(name)
                    self._see(key, microbatch, name, value)
            return line

        return line

    def _see(self, key: PhaseKey, microbatch: int, name: str, value: torch.Tensor) -> None:
        if key not in self.names:
            texts = PythonNames(self.staged.graphs[key].graph).values
            self.names[key] = {text: node for node, text in texts.items()}
        node = self.names[key].get(name)
        known = self.values[microbatch].get(node.name) if node is not None else None
        if node is None or not isinstance(known, torch.Tensor) or same(value, known) or self.first is not None:
            return
        how = {program.Received: "received by", program.Saved: "saved by"}
        word = how.get(type(node.meta.get("role")), "read by" if node.op == "placeholder" else "computed in")
        what = f"{node.name}, {word} the {key[0].label} of stage {key[1]}"
        self.first = _first_difference(what, node, difference(value, known, 0.0), key[1], microbatch)


def first_in_eager(step: Step, joint: JointGraph, values: Values) -> FirstDifference | None:
    """The first module call whose input or outputs in eager differ from the joint graph's, else None."""
    calls = _Calls(step.model, joint, values)
    with step.restored(), calls.watching():
        run_eager(step, joint)
    return calls.first


class _Calls:
    """Compares inputs and outputs of running module calls with the values of the joint graph."""

    def __init__(self, model: nn.Module, joint: JointGraph, values: Values) -> None:
        self.first: FirstDifference | None = None
        self._model, self._values = model, values
        self._inside: dict[str, list[fx.Node]] = defaultdict(list)  # by module call
        for node in (node for node in joint.computed() if not node.meta["backward"]):
            for call in ("", *node.meta["calls"]):
                self._inside[call].append(node)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._microbatch = -1
        self._counts: Counter[str] = Counter()
        self._open: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            return
        if module is self._model:
            self._microbatch, self._counts, self._open = self._microbatch + 1, Counter(), []
        name = self._names[id(module)]
        number = self._counts[name]
        self._counts[name] += 1
        self._open.append(f"{name}@{number}" if number else name)
        given = [leaf for leaf in tensors_of(args) if leaf.is_floating_point()]
        self._judge(given[:1], self._read_by(self._open[-1]), f"what enters {self._open[-1]}")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._names or not self._open:
            return
        call = self._open.pop()
        inside = self._inside[call]
        own = [node for node in inside if (node.meta["calls"] or ("",))[-1] == call]
        found = self._judge(tensors_of(output), [*own, *inside, *self._read_by(call)], f"what {call or 'the model'} returns")
        if found is not None:
            self.first = replace(found, fqn=call)

    def _read_by(self, call: str) -> list[fx.Node]:
        """The nodes outside of a call that the call reads."""
        own = dict.fromkeys(self._inside[call])
        return list(dict.fromkeys(source for node in own for source in node.all_input_nodes if source not in own))

    def _judge(self, tensors: list[torch.Tensor], nodes: list[fx.Node], what: str) -> FirstDifference | None:
        """Store and return the first difference: some tensors could be values of `nodes` (shape, dtype), but none is."""
        if self.first is not None:
            return None
        values = self._values[self._microbatch]
        pairs = [(node, tensor) for tensor in tensors for node in nodes if _alike(values[node.name], tensor)]
        if not pairs or any(same(tensor, values[node.name]) for node, tensor in pairs):
            return None
        gaps = [(difference(values[node.name], tensor.detach(), 0.0), node) for node, tensor in pairs]
        gap, nearest = min(gaps, key=lambda pair: pair[0].relative)
        self.first = _first_difference(what, nearest, gap, None, self._microbatch)
        return self.first


def tensors_of(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_flatten(structure)[0] if isinstance(leaf, torch.Tensor)]


def _alike(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dtype == tensor.dtype
