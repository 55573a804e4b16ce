"""Compare a step over microbatches with one forward and backward over the whole batch, both in eager.

- The reference is `loss(model(x), target)` of the whole batch, regardless of `gradients.reduction`: a training loop without
  microbatches computes it. The step sums losses and gradients according to that option.
- Kernels round differently for other numbers of rows, and sums over rows change their order. Differing results are therefore
  compared again within the measured effect of rounding on the whole batch (`tolerances.py`).
- If the loss or a gradient differs, the comparison names the first module call that mixes rows (such as batch norm), else the
  loss, and advises in its note. A call mixes rows if, for equal input rows, it returns other rows in a microbatch than in the
  whole batch. Calls are compared in the order in which they end, so the innermost is found first.
- Models with random operators are not compared: other numbers of rows draw other random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from graphpp._torch.autograd import module_calls_watched
from graphpp.arguments import one_word
from graphpp.batch.loss_weights import NO_WEIGHTS, LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.options.gradients import Reduction
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.random_keys import seeded
from graphpp.verification.first_difference import first_line, tensors_of
from graphpp.verification.report import Comparison, Difference, FirstDifference, difference
from graphpp.verification.runs import Numbers, Step, run_eager, run_uncut
from graphpp.verification.tolerances import Tolerances, compared, growth_of_sums, rounding, usual_tolerance

Tensors = list[torch.Tensor]
CallHook = Callable[[str, nn.Module, Tensors, Tensors], None]
Against = Literal["microbatches", "whole batch"]
AGAINST = one_word("microbatches", "whole batch")
_OF_TOLERANCE = 10  # a call mixes rows if they differ by more than ten times the tolerance: rounding accumulates
_MOST = 0.1  # or by more than a tenth


def of_whole_batch(
    step: Step,
    batch: FlatMicrobatch,
    reduction: Reduction,
    joint: JointGraph,
    tolerance: float,
    captured: Callable[[], JointGraph] | None,
) -> Comparison:
    """Compare the step with the batch that its microbatches were cut from.

    `reduction`: how the step's loss combines its microbatches' losses. `joint`: the graph of one microbatch. `captured`: makes
    the graph of the whole batch, to measure rounding; None: rounding is not measured.
    """
    drawing = next((node for node in joint.computed() if node.target is seeded), None)
    if drawing is not None:
        call = (drawing.meta.get("calls") or ("",))[-1]
        return Comparison(_TITLE, note=_DRAWS.format(f" in {call}" if call else ""), compared=False)
    once = replace(step, parts=[batch], seeds=[torch.ones_like(step.seeds[0])])
    parts, theirs = _in_eager(step, joint), _in_eager(once, joint)
    rows = [part.rows for part in step.parts]
    losses = {each: LossWeighting.of(each, NO_WEIGHTS, rows).step_loss(torch.stack(parts.losses)) for each in _MEANS}
    ours, allowed = replace(parts, losses=[losses[reduction]]), Tolerances(tolerance)
    if captured is not None and not compared(_TITLE, ours, theirs, allowed).ok:
        allowed = _rounding(once, captured(), tolerance)
    found = compared(_TITLE, ours, theirs, allowed)
    found = replace(found, largest=dict(sorted(found.largest.items(), key=lambda pair: -pair[1].relative)))
    if found.verdict != "differs":
        return found
    gaps = {each: difference(loss, theirs.losses[0], allowed.of("loss")) for each, loss in losses.items()}
    fitting = [each for each, gap in gaps.items() if gap.verdict != "differs"]
    named = [("the loss", each) for each in found.losses]
    named += [(f"the gradient of {fqn}", each) for fqn, each in found.largest.items()]
    wrong = [FirstDifference(name, "", "", each) for name, each in named if each.verdict == "differs"]
    if not wrong:
        return replace(found, note=_BUFFERS.format(len(step.parts)))
    limit = min(_OF_TOLERANCE * max(tolerance, usual_tolerance(joint)), _MOST)
    module = first_mixing_call(step, batch, limit)
    if module is not None:
        return replace(found, first=module, note=_MODULE)
    advice = _FITS.format(fitting[0]) if fitting and reduction not in fitting else _FITS_NOT
    return replace(found, first=wrong[0], note=_LOSS.format(_MEANS[reduction], advice))


def _in_eager(step: Step, joint: JointGraph) -> Numbers:
    with step.restored():
        return run_eager(step, joint)[0]


def _rounding(once: Step, joint: JointGraph, tolerance: float) -> Tolerances:
    with once.restored():
        uncut = run_uncut(once, joint)
    terms = max((tensor.numel() for tensor in once.parts[0].tensors.values()), default=1)
    note = "kernels round otherwise for another number of rows"
    return rounding(once, joint, uncut, tolerance, note, growth_of_sums(joint, terms))


def first_mixing_call(step: Step, whole: FlatMicrobatch, limit: float) -> FirstDifference | None:
    """The first module call that mixes rows, else None. `limit`: relative difference up to which rows are equal."""
    calls = _Calls(limit)
    with step.restored():
        _forward(step.model, whole, calls.keep)
    with step.restored():
        for calls.microbatch, part in enumerate(step.parts):
            calls.rows = part.rows or 1
            _forward(step.model, part, calls.compare)
            calls.start += calls.rows
    return calls.first


@dataclass
class _Calls:
    """Compares module calls for microbatches with the inputs and outputs of those for the whole batch (`known`).

    `start`, `rows`: the microbatch's first row in the batch, and its number of rows. A batch row may be several tensor rows
    ([batch * seq, d_model]). A tensor without rows, such as a loss, does not count as output.
    """

    limit: float
    first: FirstDifference | None = None
    microbatch: int = 0
    start: int = 0
    rows: int = 0
    known: dict[str, tuple[Tensors, Tensors]] = field(default_factory=dict)

    def keep(self, call: str, module: nn.Module, inputs: Tensors, outputs: Tensors) -> None:
        self.known[call] = ([each.clone() for each in inputs], [each.clone() for each in outputs])

    def compare(self, call: str, module: nn.Module, inputs: Tensors, outputs: Tensors) -> None:
        if self.first is not None or call not in self.known:
            return
        known_inputs, known_outputs = self.known[call]
        with_rows = [(each, whole) for each, whole in zip(outputs, known_outputs, strict=False) if each.shape != whole.shape]
        wrong = [gap for gap in self._gaps(with_rows) if gap.verdict == "differs"]
        if wrong and all(gap.verdict != "differs" for gap in self._gaps(zip(inputs, known_inputs, strict=False))):
            kind = type(module)
            what, source = f"the rows that {kind.__name__} returns", first_line(kind.forward)
            self.first = FirstDifference(what, call, source, wrong[0], microbatch=self.microbatch)

    def _gaps(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Difference]:
        aligned = ((each, self._rows_of(whole, each)) for each, whole in pairs)
        return [difference(each, rows, self.limit) for each, rows in aligned if rows is not None]

    def _rows_of(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """The microbatch's rows of a tensor of the whole batch. None if the shapes do not determine them."""
        if whole.dim() != like.dim():
            return None
        differing = [dim for dim in range(like.dim()) if whole.shape[dim] != like.shape[dim]]
        if not differing:
            return whole
        each, rest = divmod(like.shape[differing[0]], self.rows)
        if len(differing) > 1 or rest or (self.start + self.rows) * each > whole.shape[differing[0]]:
            return None
        return whole.narrow(differing[0], self.start * each, self.rows * each)


def _forward(model: nn.Module, part: FlatMicrobatch, seen: CallHook) -> None:
    """Run a forward; after each module call, `seen` gets its FQN (`fqn@n` if repeated), module, inputs and outputs."""
    batch, names, counts = part.microbatch(), {id(module): name for name, module in model.named_modules()}, Counter[str]()

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            number = counts[name]
            counts[name] += 1
            seen(f"{name}@{number}" if number else name, module, _floats((args, kwargs)), _floats(output))

    with module_calls_watched(leave), torch.no_grad():
        model(*batch.args, **batch.kwargs)


def _floats(structure: Any) -> Tensors:
    return [tensor for tensor in tensors_of(structure) if tensor.is_floating_point()]


_TITLE = "microbatches against the whole batch, both in eager"
_MEANS: Mapping[Reduction, str] = {"mean": "mean", "rows": "mean, weighted by rows,", "sum": "sum"}
_DRAWS = (
    "The model draws random numbers{}, and other ones for the whole batch than for its microbatches. Set the probability of "
    "dropout to 0 and verify once more."
)
_BUFFERS = (
    "The loss and the gradients are those of the whole batch. The forward writes these buffers once per microbatch, "
    "{} times a step."
)
_MODULE = (
    "The model does not separate over microbatches: a row's result depends on the other rows. Take microbatches=1, or layers "
    "that compute each row alone, such as group norm or layer norm in place of batch norm."
)
_LOSS = (
    "The loss does not separate over microbatches: its value or gradient for the whole batch is not the {} of its values or "
    "gradients for the microbatches. {}"
)
_FITS = 'gradients="{}" gives the loss of the whole batch.'
_FITS_NOT = (
    "A mean over a count, such as the tokens that are not padding, needs step(..., loss_weight=[...]) with the share of each "
    "microbatch in the count. A loss over pairs of rows needs microbatches=1, or negatives from outside of the batch, such as "
    "a queue of earlier outputs."
)
