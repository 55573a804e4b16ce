"""Where a rank of a pipeline runs: its device, and its process groups.

Contract: the device of `device=`, else the model's GPU, else torchrun's, else the CPU; the group of `group=`, else the world,
which is initialised if torchrun's variables are there and nobody has. `GraphPPError` where a rank has no such device, or is in
no such group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from graphpp.errors import GraphPPError


def place_of(model: object, group: dist.ProcessGroup | None, device: torch.device | str | None) -> Device:
    """The device and group of this rank."""
    if group is not None and not _is_member(group):
        raise GraphPPError(f"rank {dist.get_rank()} is not in the group: call compile on the ranks of its group only")
    try:
        chosen = _usable(torch.device(device) if device is not None else _default_device(model))
    except (RuntimeError, AssertionError) as error:
        first = str(error).partition("\n")[0]
        raise GraphPPError(f"device={str(device)!r} cannot be used on this machine: {first}") from error
    return Device(chosen, group if group is not None else _world(chosen))


def checked_replicas(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that train the same stages on other data, if this rank is one of them."""
    if group is not None and not _is_member(group):
        raise GraphPPError(
            f"rank {dist.get_rank()} is not in the group replicas=: give each rank the one with which it averages gradients"
        )
    return group


def _is_member(group: object) -> bool:
    """Whether this rank is in a group; torch gives ranks outside of it a number in its place."""
    return isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0


def _usable(device: torch.device) -> torch.device:
    """The device with its number, made the current one; raises what torch raises where there is none."""
    torch.empty(0, device=device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        torch.cuda.set_device(device)
    return device


def _default_device(model: object) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
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


@dataclass(frozen=True)
class Device:
    """Where a pipeline runs: the device and the process group (None: one process)."""

    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def ranks(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group) if self.group is not None else 1
