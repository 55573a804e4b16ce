"""`microbatches=`: into how many microbatches a batch is cut, and along which dimensions of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graphpp.arguments import INTEGER, Accepted, or_none, positive_up_to
from graphpp.errors import BatchError
from graphpp.options.option import Group, Option, reader_of

_COUNT, _DIM = positive_up_to(16), or_none(INTEGER)
_DIMS = Accepted(
    "a dict from the name of an argument to its batch dimension, or to None",
    lambda form: isinstance(form, Mapping) and all(isinstance(key, str) and _DIM.accepts(form[key]) for key in form),
)
_read_count = reader_of(or_none(_COUNT), BatchError)


@dataclass(frozen=True)
class Microbatches(Group):
    """How a batch is cut into microbatches. Raises `BatchError` for values of other types."""

    prefix: ClassVar[str] = "microbatches"

    count: Option[int | None, int | None] = Option(
        None,
        read=_read_count,
        takes=_COUNT.takes,
        about="Into how many microbatches `step` cuts a batch. None: the table's own number, else the largest divisor of the "
        "batch up to 4 a rank, and 1 in one process.",
    )
    batch_dims: Option[Mapping[str, int | None] | None, Mapping[str, int | None] | None] = Option(
        None,
        read=reader_of(or_none(_DIMS), BatchError),
        describe=lambda dims: [str(sorted((dims or {}).items()))],
        takes=_DIMS.takes,
        about="The batch dimension of a tensor, or of all tensors in a structure, by the name of the model's argument, "
        '`target`, `output`, or a path: `{"position_ids": 1, "args[2].cu_seqlens": None}`. None: the tensor goes whole to '
        "each microbatch. A tensor that is not named is cut along dimension 0 if that is as long as the batch has rows "
        "([Arguments](training/shapes.md#batch-dimensions)).",
    )


MicrobatchesLike = Microbatches | int | None


def read_microbatches(form: Any) -> Microbatches:
    return form if isinstance(form, Microbatches) else Microbatches(_read_count(form))
