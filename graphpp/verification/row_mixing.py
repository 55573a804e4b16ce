"""Finds the first module call that mixes the rows of a batch, as batch norm does.

Contract
--------
- A module call mixes rows if for a microbatch it gets the inputs that it gets for the whole batch, and returns other rows. The
  calls are compared in the order in which they end, so the innermost such call is found first.
- Rows are compared along the one dimension in which a microbatch's tensor and the whole batch's tensor have different sizes. A
  row of the batch may be several rows of a tensor ([batch * seq, d_model]). A tensor that has no rows, such as a loss, is not
  counted as an output.
- Two forwards run without gradients, and the inputs and outputs of all module calls of the whole batch are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphpp._torch import pytree
from graphpp._torch.autograd import module_calls_watched
from graphpp.batch.cut_batch import leading_size
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.verification.first_difference import first_line
from graphpp.verification.report import Difference, FirstDifference, difference
from graphpp.verification.runs import Step

Tensors = list[torch.Tensor]
CallHook = Callable[[str, nn.Module, Tensors, Tensors], None]


def first_mixing_call(step: Step, whole: FlatMicrobatch, limit: float) -> FirstDifference | None:
    """The first module call that mixes rows, None if there is none. `limit`: the relative difference of equal rows."""
    calls = _Calls(limit)
    with step.restored():
        _forward(step.model, whole, calls.keep)
    with step.restored():
        for calls.microbatch, part in enumerate(step.parts):
            calls.rows = leading_size(part) or 1
            _forward(step.model, part, calls.compare)
            calls.start += calls.rows
    return calls.first


@dataclass
class _Calls:
    """The inputs and outputs of each module call for the whole batch (`known`), with which those of microbatches are compared.

    `start`, `rows`: the first row of the batch that the microbatch has, and the number of its rows.
    """

    limit: float
    first: FirstDifference | None = None
    microbatch: int = 0
    start: int = 0
    rows: int = 0
    known: dict[str, tuple[Tensors, Tensors]] = field(default_factory=dict)

    def keep(self, call: str, module: nn.Module, inputs: Tensors, outputs: Tensors) -> None:
        """Keep a call for the whole batch."""
        self.known[call] = ([each.clone() for each in inputs], [each.clone() for each in outputs])

    def compare(self, call: str, module: nn.Module, inputs: Tensors, outputs: Tensors) -> None:
        """Compare a call for a microbatch."""
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
        """The microbatch's rows of a tensor of the whole batch. None where the shapes do not tell which these are."""
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
    """Run a forward; `seen` gets each module call when it ends: its FQN (`fqn@n` if repeated), module, inputs and outputs."""
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
    leaves = pytree.tree_flatten(structure)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
