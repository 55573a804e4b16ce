"""`microbatches=`: into how many microbatches a batch is cut, and along which dimensions of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graphpp.arguments import INTEGER, or_none, positive_up_to, shown
from graphpp.errors import BatchError
from graphpp.options.option import Group, Option, group_reader, reader_of

_COUNT, _DIM = positive_up_to(16), or_none(INTEGER)
_DIMS = "a dict from the name of an argument to its batch dimension, or to None"


def _read_dims(form: Any) -> dict[str, int | None]:
    form = {} if form is None else form
    if not isinstance(form, Mapping) or not all(isinstance(key, str) and _DIM.accepts(dim) for key, dim in form.items()):
        raise BatchError(f"take {_DIMS}, got {shown(form)}")
    return dict(form)


@dataclass(frozen=True)
class Microbatches(Group):
    """How a batch is cut into microbatches. Raises `BatchError` for values of other types."""

    prefix: ClassVar[str] = "microbatches"

    count: Option[int | None, int | None] = Option(
        None,
        read=reader_of(or_none(_COUNT), BatchError),
        takes=_COUNT.takes,
        about="Into how many microbatches `step` cuts a batch. None: the table's own number, else the largest divisor of the "
        "batch up to 4 a rank, and 1 in one process.",
    )
    batch_dims: Option[Mapping[str, int | None] | None, Mapping[str, int | None]] = Option(
        None,
        read=_read_dims,
        describe=lambda dims: [str(sorted(dims.items()))],
        takes=_DIMS,
        about="The batch dimension of a tensor, or of all tensors in a structure, by the name of the model's argument, "
        '`target`, `output`, or a path: `{"position_ids": 1, "args[2].cu_seqlens": None}`. None: the tensor goes whole to '
        "each microbatch. A tensor that is not named is cut along dimension 0 if that is as long as the batch has rows "
        "([Arguments](training.md#batch-dimensions)).",
    )


MicrobatchesLike = Microbatches | int | None
read_microbatches = group_reader(Microbatches, "count", lambda form: True)
