"""`memory=`: which activations are alive between forward and backward, and which parameters a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphpp.arguments import FLAG, shown
from graphpp.errors import GraphPPError
from graphpp.options import offload as offloading
from graphpp.options import recompute as recomputing
from graphpp.options.offload import Offload, OffloadLike
from graphpp.options.option import Group, Option, group_reader, reader_of
from graphpp.options.recompute import Recompute, RecomputeLike

Cap = int | tuple[int, ...] | None


def _read_cap(form: object) -> Cap:
    caps = tuple(form) if isinstance(form, Sequence) and not isinstance(form, str | bytes) else (form,)
    if form is not None and not (caps and all(type(cap) is int and cap > 0 for cap in caps)):
        raise GraphPPError(f"take a positive number of bytes, or one for each rank, got {shown(form)}")
    return tuple(form) if isinstance(form, Sequence) else form  # type: ignore[return-value]


@dataclass(frozen=True)
class Memory(Group):
    """The activations that are alive between forward and backward, and the parameters that a rank keeps.

    Raises `GraphPPError` for values that no option takes.
    """

    prefix: ClassVar[str] = "memory"

    recompute: Option[RecomputeLike, Recompute | None] = Option(
        None,
        read=recomputing.read_recompute,
        describe=recomputing.describe_recompute,
        takes=recomputing.RECOMPUTE_FORMS,
        about="Which values are computed a second time for the backward instead of being saved. None: values that cost next "
        "to nothing (views, casts, pointwise operations, norms, look-ups in saved tensors). A number above 0 and up to 1: "
        "more of them, at the least cost in time, until every stage saves that fraction of the bytes that it saves under "
        'None, or as close as it can come. "selective": in the layers all but matrix products, convolutions, attention and '
        'collectives. "full": every layer. Bit-equal, dropout included. A schedule with recompute marks says for which '
        "stages and microbatches.",
    )
    offload: Option[OffloadLike, Offload | None] = Option(
        None,
        read=offloading.read_offload,
        describe=offloading.describe_offload,
        takes=offloading.OFFLOAD_FORMS,
        about="Which saved values wait for their backward in the host's pinned memory. A fraction: of the bytes that a stage "
        "saves for a microbatch, the largest values first. True: every value that is worth the copy. Values whose backward "
        "comes soon stay. The plan lists the values; `memory.cap` does not count them while they are away. The same bits. On "
        "the CPU nothing moves.",
    )
    cap: Option[int | Sequence[int] | None, Cap] = Option(
        None,
        read=_read_cap,
        takes="bytes, or a sequence with the bytes of each rank",
        about="Bytes of activations that may be alive on a rank during a step. A schedule that needs more is refused before "
        "the first step. Counted from the graph: values that wait for their backward, and values alive while a program "
        "runs. Parameters, gradients and an operator's own workspace come on top.",
    )
    release: Option[bool, bool] = Option(
        True,
        read=reader_of(FLAG),
        takes="True, False",
        about="Whether a rank gives back the memory of the parameters and buffers that other ranks hold, as soon as the model "
        "is captured. False keeps copies, which do not follow the training, until `pipe.release()`; a second pipeline over the "
        "same model that puts a parameter on another rank needs this. One rank holds everything and gives nothing back.",
    )

    def caps(self, ranks: int) -> tuple[int, ...] | None:
        """The cap of each rank in bytes. Raises `GraphPPError` if there are not as many as ranks."""
        if self.cap is None:
            return None
        caps = self.cap if isinstance(self.cap, tuple) else (self.cap,) * ranks
        if len(caps) != ranks:
            raise GraphPPError(f"memory.cap: take one number of bytes, or one for each of {ranks} ranks, got {self.cap!r}")
        return caps


MemoryLike = Memory | RecomputeLike
read_memory = group_reader(Memory, "recompute", recomputing.is_recompute)
