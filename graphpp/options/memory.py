"""`memory=`: activations that are kept until the backward, released parameters, and a cap for all bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphpp.arguments import COUNT, FLAG, NUMBER, or_none, shown
from graphpp.errors import GraphPPError
from graphpp.options.offload import OFFLOAD_FORMS, Offload, OffloadLike, read_offload
from graphpp.options.option import Group, Option, group_reader
from graphpp.options.recompute import RECOMPUTE_FORMS, Recompute, RecomputeLike, is_recompute, read_recompute

Cap = int | tuple[int, ...] | None


def _read_cap(form: object) -> Cap:
    caps = tuple(form) if isinstance(form, Sequence) and not isinstance(form, str | bytes) else (form,)
    if form is not None and not (caps and all(type(cap) is int and cap > 0 for cap in caps)):
        raise GraphPPError(f"take a positive number of bytes, or one for each rank, got {shown(form)}")
    return tuple(form) if isinstance(form, Sequence) else form  # type: ignore[return-value]


_VALUES = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}
"""Optimizers by name, and how many values of the parameter's dtype each keeps for a trained element."""
_OPTIMIZERS = '"adamw", "adam", "momentum", "sgd", or a number of bytes from 0 to 1024'


def _read_optimizer(form: object) -> str | float:
    if isinstance(form, str) and form in _VALUES:
        return form
    if NUMBER.accepts(form) and 0 <= form <= 1024:  # type: ignore[operator]
        return form  # type: ignore[return-value]
    raise GraphPPError(f"take {_OPTIMIZERS}, got {shown(form)}")


@dataclass(frozen=True)
class Memory(Group):
    """Saved activations, released parameters, and a cap for all bytes. Raises `GraphPPError` for invalid values."""

    prefix: ClassVar[str] = "memory"

    recompute: Option[RecomputeLike, Recompute | None] = Option(
        None,
        read=read_recompute,
        takes=RECOMPUTE_FORMS,
        about="Which values are computed a second time for the backward instead of being saved. None: values that cost next "
        "to nothing (views, casts, pointwise operations, norms, look-ups in saved tensors). A number above 0 and up to 1: "
        "more of them, at the least cost in time, until every stage saves that fraction of the bytes that it saves under "
        'None, or as close as it can come. "selective": in the layers all but matrix products, convolutions, attention and '
        'collectives. "full": every layer. Bit-equal, dropout included; code of Inductor for a GPU '
        "rounds by the kernel in which an operation stands. A schedule with recompute marks says for which stages and "
        "microbatches.",
    )
    offload: Option[OffloadLike, Offload | None] = Option(
        None,
        read=read_offload,
        takes=OFFLOAD_FORMS,
        about="Which saved values wait for their backward in the host's pinned memory. A fraction: of the bytes that a stage "
        "saves for a microbatch, the largest values first. True: every value that is worth the copy. Values whose backward "
        "comes soon stay. The plan lists the values; `memory.cap` does not count them while they are away. The same bits. On "
        "the CPU nothing moves.",
    )
    cap: Option[int | Sequence[int] | None, Cap] = Option(
        None,
        read=_read_cap,
        takes="bytes, or a sequence with the bytes of each rank",
        about="Bytes that may be alive on a rank at one time of a training step: parameters, gradients, buffers, the state of "
        "the optimizer (see `memory.optimizer`), messages between stages, and activations, which are values that wait for "
        "their backward and values alive while a program runs. A schedule that needs more is refused before the first step; "
        "`pipe.plan.memory` has all these bytes. Counted from the graph and the table; an operator's own workspace and the "
        "memory of the transport come on top.",
    )
    optimizer: Option[str | float, str | float] = Option(
        "adamw",
        read=_read_optimizer,
        takes=_OPTIMIZERS,
        about="What the optimizer keeps, which graphpp does not know, for the plan and `memory.cap`. AdamW and Adam keep two "
        "values of the parameter's dtype for each trained element, SGD with momentum one, SGD none. A number: the bytes for "
        "each trained element, e.g. 12 for two values and a copy of the weights in float32.",
    )
    release: Option[bool, bool] = Option(
        True,
        read=FLAG,
        about="Whether a rank gives back the memory of the parameters and buffers that other ranks hold, as soon as the model "
        "is captured. False keeps copies, which do not follow the training, until `pipe.release()`; a second pipeline over the "
        "same model that puts a parameter on another rank needs this. One rank holds everything and gives nothing back.",
    )

    outputs: Option[bool, bool] = Option(
        False,
        read=FLAG,
        about="Whether steps too return the model's output on the rank of the last stage, as `pipe.eval` does: "
        "`StepResult.output`, without gradients. That rank keeps the output of each microbatch until the step ends, and "
        "`pipe.plan.memory` and `memory.cap` count these bytes among the buffers.",
    )

    logits_tokens: Option[int | None, int | None] = Option(
        None,
        read=or_none(COUNT),
        about="How many tokens' logits exist at one time. The head, a linear layer over many words, and its cross entropy work "
        "through a microbatch's tokens in pieces: logits, their softmax and their gradients never exist for all tokens. The "
        "gradient of the head's weight is computed in the forward and kept until the backward. Numbers are equal but for the "
        "rounding of sums over pieces. None: all at once. A model without a cross entropy over a linear layer is refused.",
    )

    word_parts: Option[int | None, int | None] = Option(
        None,
        read=or_none(COUNT),
        about="In how many parts the words of the head are cut, each computed by a stage of its own: as many as the pipeline "
        "has ranks. The head is a linear layer whose results only a cross entropy reads. Each rank then holds and trains "
        "its part of the weight, and of an embedding tied to it. The parts are the calls `words[0]`, `words[1]`, .. of the "
        "head, and the last stages: ask for at least one stage more, such as `split=2 * ranks`. The parameter becomes a "
        "`DTensor` once the model is captured. Numbers are equal but for the rounding of sums over the parts. None: the "
        "head is in the last stage.",
    )

    def optimizer_bytes(self, elements: int, itemsize: int) -> int:
        """Bytes of optimizer state for trained elements of `itemsize` bytes each."""
        each = _VALUES[self.optimizer] * itemsize if isinstance(self.optimizer, str) else self.optimizer
        return math.ceil(elements * each)

    def caps(self, ranks: int) -> tuple[int, ...] | None:
        """The cap of each rank in bytes. Raises `GraphPPError` if their number is not `ranks`."""
        if self.cap is None:
            return None
        caps = self.cap if isinstance(self.cap, tuple) else (self.cap,) * ranks
        if len(caps) != ranks:
            raise GraphPPError(f"memory.cap: take one number of bytes, or one for each of {ranks} ranks, got {self.cap!r}")
        return caps


MemoryLike = Memory | RecomputeLike
read_memory = group_reader(Memory, "recompute", is_recompute)
