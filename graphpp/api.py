"""`graphpp.compile`: from an unmodified model and a loss to a pipeline, with everything that can be checked checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from graphpp.capture import LossFunction
from graphpp.compiler import Settings
from graphpp.errors import BatchError, CaptureError, GraphPPError
from graphpp.pipeline import Pipeline
from graphpp.runtime import schedules
from graphpp.runtime.runner import Device
from graphpp.runtime.schedule import Schedule
from graphpp.signature import Microbatch
from graphpp.split import Split


def compile(
    model: nn.Module,
    loss: LossFunction | None = None,
    *,
    example: Microbatch | None = None,
    split: Split = None,
    schedule: schedules.Source = "auto",
    microbatches: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean",
    dump: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Compile `model` and `loss` into a pipeline-parallel training step. Called by every rank with the same arguments.

    Args:
        model: any module that `torch.export` can trace; it is not changed, and its forward never runs on data.
        loss: `loss(output, target)` -> scalar; None: the output's own `.loss`, as Hugging Face models return.
        example: one microbatch, for its shapes; None: taken from the first step.
        split: where stages start: FQNs, one list of FQNs per stage, a number of stages, `graphpp.split_points(...)`,
            a `graphpp.Layout`; None: one stage per slot of the schedule, equal numbers of layers.
        schedule: "auto", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", a CSV file in torch's format, a `Schedule`,
            or a function (ranks, stages, microbatches) -> table. auto: a plain loop in one process, 1F1B for one stage
            a rank, Interleaved1F1B for several.
        microbatches: into how many parts `step` cuts a batch; None: the largest divisor of the batch up to 4 a rank.
        group: the ranks of this pipeline; None: the world, initialised from torchrun's variables if nobody has;
            without those: one process.
        device: where this rank runs; None: the model's own CUDA device, else CUDA by LOCAL_RANK where every local
            rank has a GPU, else the CPU.
        loss_reduction: "mean" or "sum" of the loss over microbatches; gradients follow.
        dump: folder for dumps of graphs, plan and schedule; None: the variable GRAPHPP_DUMP, if set.

    Raises:
        CaptureError, SplitError, ScheduleError: what cannot be compiled, and why; `MismatchError` on every rank where
            the ranks were given different things. All are `GraphPPError`. Nothing was changed then.
    """
    _check(model, loss, loss_reduction, microbatches)
    place = _place(model, group, device)
    folder = dump if dump is not None else os.environ.get("GRAPHPP_DUMP") or None
    settings = Settings(
        place=place,
        example=example,
        split=split,
        schedule=schedules.read(schedule) if isinstance(schedule, str | os.PathLike) else schedule,
        microbatches=schedule.microbatches if isinstance(schedule, Schedule) and microbatches is None else microbatches,
        loss_reduction=loss_reduction,
        dump=Path(folder) if folder is not None else None,
    )
    return Pipeline(model, loss, settings)


def _check(model: Any, loss: Any, loss_reduction: str, microbatches: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model must be an nn.Module, got {type(model).__name__}")
    if loss_reduction not in ("mean", "sum"):
        raise GraphPPError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
    if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
        raise BatchError(f"microbatches must be a positive integer, got {microbatches!r}")
    trainable = [name for name, p in loss.named_parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
    if trainable:
        raise CaptureError(
            f"the loss has trainable parameters of its own ({', '.join(trainable[:3])}): they would never be updated. "
            "Make the loss a part of the model and pass loss=None with an output that has `.loss`."
        )


def _place(model: nn.Module, group: dist.ProcessGroup | None, device: torch.device | str | None) -> Device:
    chosen = torch.device(device) if device is not None else _default_device(model)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", torch.cuda.current_device()) if chosen.index is None else chosen
        torch.cuda.set_device(chosen)
    if group is None:
        group = _world(chosen)
    return Device(chosen, group)


def _default_device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    if first is not None and first.device.type == "cuda":
        return first.device
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _world(device: torch.device) -> dist.ProcessGroup | None:
    """The world group, initialised from torchrun's variables if nobody has; None for one process."""
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return None
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return dist.group.WORLD
