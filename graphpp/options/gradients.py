"""`gradients=`: how losses and gradients add up over the microbatches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from graphpp.arguments import FLAG, one_word, or_none
from graphpp.options.option import FLOATING_DTYPE, Group, Option, group_reader

Reduction = Literal["mean", "sum", "rows"]


@dataclass(frozen=True)
class Gradients(Group):
    """The sums of losses and gradients over the microbatches of a step. Raises `GraphPPError` for values of other types."""

    prefix: ClassVar[str] = "gradients"

    reduction: Option[Reduction, Reduction] = Option(
        "mean",
        read=one_word("mean", "sum", "rows"),
        about="The loss of a step is the mean or the sum over the microbatches, or the mean weighted by their rows, so that a "
        "smaller last microbatch counts less; gradients follow.",
    )
    dtype: Option[torch.dtype | None, torch.dtype | None] = Option(
        None,
        read=or_none(FLOATING_DTYPE),
        about="The dtype in which gradients of narrower parameters add up over a step, e.g. `torch.float32` for bfloat16 "
        "parameters; `param.grad` is rounded to its own dtype once, at the end. None: the gradient's own dtype, as "
        "autograd adds.",
    )
    fused: Option[bool | None, bool | None] = Option(
        None,
        read=or_none(FLAG),
        about="True: the matrix product that makes a weight's gradient adds it into the sum, so no gradient is kept per "
        "microbatch. Sums are rounded otherwise: about 1e-6 of a gradient's largest element in float32, 1e-2 in bfloat16. "
        'False: bit-equal to a plain loop. None: True under every backend but "eager".',
    )


GradientsLike = Gradients | Reduction | None
read_gradients = group_reader(Gradients, "reduction", lambda form: isinstance(form, str))
