"""What `compile` is given, checked before anything is made of it.

Contract: each function raises a `GraphPPError` that says what the argument must be and what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.refusals import check_modules
from graphpp.errors import BatchError, CaptureError, GraphPPError, ScheduleError
from graphpp.schedules.generate.read import Source
from graphpp.schedules.table.schedule import Schedule


def check_given(model: object, loss: object, example: object, loss_reduction: object) -> None:
    """Raise `GraphPPError` for arguments that are not what they must be."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model must be an nn.Module, got {type(model).__name__}")
    check_modules(model)
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"loss must be a function loss(output, target) -> scalar, or None, got {type(loss).__name__}"
        )
    if example is not None and not isinstance(example, Microbatch):
        raise BatchError(f"example must be a graphpp.Microbatch(args, kwargs, target), got {type(example).__name__}")
    if loss_reduction not in ("mean", "sum"):
        raise GraphPPError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
    _check_frozen(loss)


def check_settings(accumulate_dtype: object, max_graphs: object, fused_accumulation: object, op_costs: object) -> None:
    """Raise `GraphPPError` for settings that are not what they must be."""
    if accumulate_dtype is not None and not (
        isinstance(accumulate_dtype, torch.dtype) and accumulate_dtype.is_floating_point and accumulate_dtype.itemsize > 1
    ):
        raise GraphPPError(
            f"accumulate_dtype must be a floating torch.dtype of 16 bits or more, or None, got {accumulate_dtype!r}"
        )
    if not isinstance(max_graphs, int) or isinstance(max_graphs, bool) or max_graphs < 1:
        raise GraphPPError(f"max_graphs must be a positive integer, got {max_graphs!r}")
    if fused_accumulation is not None and not isinstance(fused_accumulation, bool):
        raise GraphPPError(f"fused_accumulation must be True, False or None, got {fused_accumulation!r}")
    if op_costs is not None and not callable(op_costs):
        raise GraphPPError(f"op_costs must be a function of a graph's node -> seconds, or None, got {op_costs!r}")


def _check_frozen(loss: object) -> None:
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trainable = [name for name, parameter in parameters if parameter.requires_grad]
    if trainable:
        raise CaptureError(
            f"the loss has trainable parameters of its own ({', '.join(trainable[:3])}): they would never be updated. "
            "Make the loss a part of the model and pass loss=None with an output that has `.loss`."
        )


def number_of_microbatches(given: object, schedule: Source) -> int | None:
    """The number of microbatches, which a table brings along."""
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise BatchError(f"microbatches must be a positive integer, got {given!r}")
    if isinstance(schedule, Schedule):
        if given not in (None, schedule.microbatches):
            raise ScheduleError(
                f"microbatches={given}, but the schedule {schedule.name!r} is for {schedule.microbatches}"
            )
        return schedule.microbatches
    return given


def checked_cap(given: int | Sequence[int] | None, ranks: int) -> int | tuple[int, ...] | None:
    """The cap of every rank."""
    if given is None:
        return None
    caps = tuple(given) if isinstance(given, Sequence) else (given,) * ranks
    if len(caps) != ranks or not all(type(cap) is int and cap > 0 for cap in caps):
        raise GraphPPError(f"memory_cap must be a positive number of bytes, or one for each of {ranks} ranks, got {given!r}")
    return caps


def checked_flag(name: str, given: object) -> bool:
    """The flag, if it is one."""
    if not isinstance(given, bool):
        raise GraphPPError(f"{name} must be True or False, got {given!r}")
    return given
