"""Verifies a pipeline in one process, before a cluster is rented: runs one step in three ways and compares the results.

Contract
--------
- The stage programs, run by the pipeline's own runner, are compared with the uncut joint graph. On the CPU the bits must be
  equal; the tolerance holds for a tied parameter's sum, with fused accumulation for every gradient, under a backend for every
  result. The joint graph is compared with plain eager, within the tolerance.
- A backend sums in other orders. The effect on a gradient depends on the model: 2e-7 in a transformer, 1e-4 in a network whose
  batch norm sees two rows. So the tolerance of each result is measured (`verification/tolerances.py`).
- A schedule for several ranks is checked with all its rows and messages. Then its actions run on one rank, in an order in
  which the ranks could run them.
- No process group is needed. The model (parameters, gradients, buffers, attributes) and the random state are restored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphpp.batch.cut_batch import leading_size
from graphpp.batch.loss_weights import NO_WEIGHTS, LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.loss import LossFunction
from graphpp.compiler.compile_graph import CompiledGraph
from graphpp.options.gradients import Reduction
from graphpp.options.options import Options
from graphpp.parallel.place import RankPlace
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.model_state import ModelState, state_restored
from graphpp.verification.first_difference import first_in_eager, first_in_results, first_in_stages, values_of
from graphpp.verification.report import Comparison, FirstDifference, Verification
from graphpp.verification.runs import Numbers, Step, run_cut, run_eager, run_uncut
from graphpp.verification.subject import Subject, check_one_shape, moved_to, subject_of
from graphpp.verification.tolerances import Tolerances, compared, rounding

_FLOAT32_TOLERANCE = 1e-6


def verified(
    model: nn.Module,
    loss: LossFunction | None,
    options: Options,
    place: RankPlace,
    parts: Sequence[FlatMicrobatch],
    tolerance: float | None = None,
    dumps: bool = False,
) -> Verification:
    """The report for these microbatches; `place` says for how many ranks the schedule is, `dumps` whether graphs are dumped."""
    began = time.perf_counter()
    check_one_shape(parts)
    device = place.device
    ModelState(model).check_memory([name for name, _ in (*model.named_parameters(), *model.named_buffers())])
    parts = [moved_to(device, part) for part in parts]
    with state_restored(model, device):
        compiled = subject_of(model, loss, options, place, parts, dumps)
        seeds = _seeds(compiled.graph, options.gradients.reduction, parts, device)
        step = Step(model, loss, parts, seeds, device, options.gradients.dtype, compiled.uncut.written())
        allowed = _tolerance(compiled.uncut) if tolerance is None else tolerance
        cut, eager = _three_ways(step, compiled, allowed, measured=tolerance is None)
    return Verification(cut, eager, compiled.graph.plan, allowed, time.perf_counter() - began)


def _seeds(
    graph: CompiledGraph, reduction: Reduction, parts: Sequence[FlatMicrobatch], device: torch.device
) -> list[torch.Tensor]:
    assert graph.program.loss is not None
    weighting = LossWeighting.of(reduction, NO_WEIGHTS, [leading_size(part) for part in parts])
    return weighting.seeds(len(parts), graph.program.loss.dtype, device)


# ------------------------------------------------------------------------------------------------------ compare


def _three_ways(step: Step, compiled: Subject, tolerance: float, measured: bool) -> tuple[Comparison, Comparison]:
    with step.restored():
        uncut = run_uncut(step, compiled.uncut)
    cut = _of_cut(step, compiled, uncut, _tolerances(step, compiled, uncut, tolerance, measured))
    with step.restored():
        eager = run_eager(step, compiled.uncut)
    if not eager.matched:
        return cut, Comparison(_EAGER, note=_OTHER_NUMBERS, compared=False)
    found = _against_eager(step, compiled, (uncut, eager.numbers), tolerance, measured)
    if found.verdict != "equal":
        first = first_in_eager(step, compiled.uncut, values_of(step, compiled.uncut))
        found = replace(found, first=_placed(first or first_in_results(found, compiled.uncut), step.loss))
    return cut, found


def _against_eager(
    step: Step, compiled: Subject, results: tuple[Numbers, Numbers], tolerance: float, measured: bool
) -> Comparison:
    """Compare the joint graph with eager; results that differ are compared once more within the measured effect of rounding.

    A trace may run other operators than eager (an LSTM's), and some gradients, such as that of a bias before a norm, consist of
    rounding alone.
    """
    found = compared(_EAGER, *results, Tolerances(tolerance))
    if found.verdict != "differs" or not measured:
        return found
    wider = rounding(step, compiled.uncut, results[0], tolerance, "a trace runs other code than eager")
    second = compared(_EAGER, *results, wider)
    return found if second.verdict == "differs" else replace(second, note=wider.note)


_CUT = "stage programs against the uncut joint graph"
_EAGER = "joint graph against eager"
_OTHER_NUMBERS = (
    "The model draws other random numbers in eager than under a trace, so no bits can be compared. Verify it with its dropout "
    "set to 0 as well."
)


def _tolerances(step: Step, compiled: Subject, uncut: Numbers, tolerance: float, measured: bool) -> Tolerances:
    """The tolerances of the stage programs against the uncut graph."""
    stages = compiled.graph.program.stages
    fused = any(item.fused for stage in stages for item in stage.programs.values())
    made = [fqn for stage in stages for fqn in stage.gradients]
    tied = sorted({fqn for fqn in made if made.count(fqn) > 1})
    note = f"{', '.join(tied)} in several stages: parts are added per stage first" if tied else ""
    note = "gradients.fused: the sums of gradients are rounded otherwise" if fused else note
    if compiled.backend:
        note = "backend: compiled programs are rounded otherwise"
        return rounding(step, compiled.uncut, uncut, tolerance, note) if measured else Tolerances(tolerance, {}, note)
    if step.device.type != "cpu":  # a GPU may add in another order at every run
        return Tolerances(tolerance, {}, note)
    return Tolerances(0.0, {f"gradient of {fqn}": tolerance for fqn in (uncut.grads if fused else tied)}, note)


def _of_cut(step: Step, compiled: Subject, uncut: Numbers, tolerances: Tolerances) -> Comparison:
    with step.restored():
        ours = run_cut(step, compiled.programs, compiled.row)
    found = compared(_CUT, ours, uncut, tolerances)
    found = replace(found, note=tolerances.note if found.verdict != "equal" else "")
    if found.verdict == "differs":
        first = _first_in_cut(step, compiled) if not compiled.backend else None  # a compiled program's values differ anyway
        first = first or first_in_results(found, compiled.uncut, compiled.graph.program)
        found = replace(found, first=_placed(first, step.loss))
    return found


def _first_in_cut(step: Step, compiled: Subject) -> FirstDifference | None:
    return first_in_stages(step, values_of(step, compiled.uncut), compiled.staged, compiled.programs, compiled.row)


def _placed(first: FirstDifference | None, loss: Any) -> FirstDifference | None:
    """The difference with a source line: for the loss, of which torch.export keeps no lines, the first line of its function."""
    code = getattr(loss, "__code__", None)
    if first is None or first.fqn or first.source or code is None:
        return first
    return replace(first, source=f"{code.co_filename}:{code.co_firstlineno}")


def _tolerance(joint: JointGraph) -> float:
    values = [node.meta["val"] for node in joint.computed() if isinstance(node.meta["val"], torch.Tensor)]
    coarsest = max((torch.finfo(value.dtype).eps for value in values if value.is_floating_point()), default=0.0)
    return _FLOAT32_TOLERANCE * coarsest / torch.finfo(torch.float32).eps
