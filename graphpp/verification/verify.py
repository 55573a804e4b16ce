"""Verify a pipeline in one process: run one step in three ways and compare the results.

- Stage programs, run by the pipeline's runner, are compared with the uncut joint graph. On the CPU all bits must be equal; a
  tolerance holds for a tied parameter's sum, for all gradients with fused accumulation, and for all results under a backend.
  The joint graph is compared with plain eager within the tolerance.
- A backend changes the order of sums, with an effect that depends on the model, so each result's tolerance is measured.
- Given a whole batch, eager over its microbatches is compared with eager over the batch.
- No process group is needed. The model (parameters, gradients, buffers, attributes) and the random state are restored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from graphpp.batch.loss_weights import NO_WEIGHTS, LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.loss import LossFunction
from graphpp.compiler.request import CompileRequest
from graphpp.errors import BatchError
from graphpp.options.options import Options
from graphpp.parallel.rank_place import RankPlace
from graphpp.runtime.model_state import ModelState, state_restored
from graphpp.runtime.parameter_rows import whole_name
from graphpp.verification.first_difference import (
    first_in_eager,
    first_in_results,
    first_in_stages,
    first_line,
    first_not_finite,
    values_of,
)
from graphpp.verification.report import Comparison, FirstDifference, Verification
from graphpp.verification.runs import Numbers, Step, run_cut, run_eager, run_uncut
from graphpp.verification.subject import Subject, moved_to, of_other_shapes, subject_of, uncut_graph
from graphpp.verification.tolerances import Tolerances, compared, rounding, usual_tolerance
from graphpp.verification.whole_batch import of_whole_batch


def verified(
    model: nn.Module,
    loss: LossFunction | None,
    options: Options,
    place: RankPlace,
    parts: Sequence[FlatMicrobatch],
    tolerance: float | None = None,
    dumps: bool = False,
    whole: FlatMicrobatch | None = None,
) -> Verification:
    """The report for these microbatches; `place` tells for how many ranks; `dumps`: whether graphs are dumped.

    `whole`: the batch that the microbatches were cut from; the step is then compared with a step over it too.
    """
    began = time.perf_counter()
    other = of_other_shapes(parts)
    if whole is None and other:
        raise BatchError(
            f"microbatch {other[0]} differs in shape or structure from microbatch 0: verify microbatches of one shape at a time"
        )
    device, request = place.device, CompileRequest(model, loss, options, place, dumps=dumps)
    ModelState(model).check_memory([name for name, _ in (*model.named_parameters(), *model.named_buffers())])
    parts = [moved_to(device, part) for part in parts]
    with state_restored(model, device):
        compiled = subject_of(request, parts)
        assert compiled.graph.program.loss is not None
        weighting = LossWeighting.of(options.gradients.reduction, NO_WEIGHTS, [part.rows for part in parts])
        seeds = weighting.seeds(len(parts), compiled.graph.program.loss.dtype, device)
        step = Step(model, loss, parts, seeds, device, options.gradients.dtype, compiled.uncut.written())
        allowed = usual_tolerance(compiled.uncut) if tolerance is None else tolerance
        cut, eager = _three_ways(step, compiled, allowed, measured=tolerance is None)
        against = None
        if whole is not None:
            whole, reduction = moved_to(device, whole), options.gradients.reduction
            captured = partial(uncut_graph, replace(request, dumps=False), whole)
            against = of_whole_batch(step, whole, reduction, compiled.uncut, allowed, captured if tolerance is None else None)
            against = replace(against, first=_placed(against.first, loss))
    return Verification(cut, eager, compiled.graph.plan, allowed, time.perf_counter() - began, against)


_CUT = "stage programs against the uncut joint graph"
_EAGER = "joint graph against eager"
_OTHER_NUMBERS = (
    "The model draws other random numbers in eager than under a trace, so no bits can be compared. Verify it with its dropout "
    "set to 0 as well."
)


def _three_ways(step: Step, compiled: Subject, tolerance: float, measured: bool) -> tuple[Comparison, Comparison]:
    """The two comparisons; microbatch 0 replaces microbatches of other shapes."""
    others = of_other_shapes(step.parts)
    uniform = [step.parts[0] if at in others else part for at, part in enumerate(step.parts)]
    cut, eager = _of_one_shape(replace(step, parts=uniform), compiled, tolerance, measured)
    if not others:
        return cut, eager
    said = f"Microbatch 0 ran in the place of microbatch {', '.join(map(str, others))}, which has another shape. "
    return replace(cut, note=f"{said}{cut.note}"), replace(eager, note=f"{said}{eager.note}")


def _of_one_shape(step: Step, compiled: Subject, tolerance: float, measured: bool) -> tuple[Comparison, Comparison]:
    with step.restored():
        uncut = run_uncut(step, compiled.uncut)
    cut = _of_cut(step, compiled, uncut, _tolerances(step, compiled, uncut, tolerance, measured))
    with step.restored():
        eager, matched = run_eager(step, compiled.uncut)
    if not matched:
        return cut, Comparison(_EAGER, note=_OTHER_NUMBERS, compared=False)
    found = _against_eager(step, compiled, (eager, uncut), tolerance, measured)
    if found.verdict in ("close", "differs"):
        first = first_in_eager(step, compiled.uncut, values_of(step, compiled.uncut))
        found = replace(found, first=_placed(first or first_in_results(found, compiled.uncut), step.loss))
    return cut, found


def _against_eager(
    step: Step, compiled: Subject, results: tuple[Numbers, Numbers], tolerance: float, measured: bool
) -> Comparison:
    """Compare eager with the joint graph (`results`), and again within the measured effect of rounding if results differ.

    A trace may run other operators than eager (for an LSTM), and some gradients, such as of a bias before a norm, consist only
    of rounding errors.
    """
    found = compared(_EAGER, *results, Tolerances(tolerance))
    if found.verdict != "differs" or not measured:
        return found
    wider = rounding(step, compiled.uncut, results[1], tolerance, "a trace runs other code than eager")
    second = compared(_EAGER, *results, wider)
    return second if second.ok else found


def _tolerances(step: Step, compiled: Subject, uncut: Numbers, tolerance: float, measured: bool) -> Tolerances:
    stages = compiled.graph.program.stages
    fused = any(item.fused for stage in stages for item in stage.programs.values())
    made = [fqn for stage in stages for fqn in stage.gradients]
    tied = sorted({whole_name(fqn) for fqn in made if made.count(fqn) > 1})
    note = f"{', '.join(tied)} in several stages: parts are added per stage first" if tied else ""
    note = "gradients.fused: the sums of gradients are rounded otherwise" if fused else note
    if compiled.backend:
        note = "backend: compiled programs are rounded otherwise"
        return rounding(step, compiled.uncut, uncut, tolerance, note) if measured else Tolerances(tolerance, {}, note)
    if step.device.type != "cpu":  # a GPU's order of summation may vary
        return Tolerances(tolerance, {}, note)
    return Tolerances(0.0, {f"gradient of {fqn}": tolerance for fqn in (uncut.grads if fused else tied)}, note)


def _of_cut(step: Step, compiled: Subject, uncut: Numbers, tolerances: Tolerances) -> Comparison:
    with step.restored():
        ours = run_cut(step, compiled.programs, compiled.row)
    found = compared(_CUT, ours, uncut, tolerances)
    if found.verdict == "not finite":
        return replace(found, first=_placed(first_not_finite(compiled.uncut, values_of(step, compiled.uncut)), step.loss))
    if found.verdict == "differs":
        first = None
        if not compiled.backend:  # values inside compiled programs always differ
            values = values_of(step, compiled.uncut)
            first = first_in_stages(step, values, compiled.staged, compiled.programs, compiled.row)
        first = first or first_in_results(found, compiled.uncut, compiled.graph.program)
        found = replace(found, first=_placed(first, step.loss))
    return found


def _placed(first: FirstDifference | None, loss: Any) -> FirstDifference | None:
    """The difference with a source line: for the loss, for which torch.export keeps none, its function's first line."""
    if first is None or first.fqn or first.source:
        return first
    return replace(first, source=first_line(loss))
