"""The contents of a checkpoint, by name and independent of ranks, stages and schedule.

Contract
    `TrainingState` is a `Stateful` of torch's distributed checkpoint: `state_dict` and `load_state_dict` of this rank's part.
    Its entries:
        model.<key>                     the rank's parameters and buffers, under every key of the model's state dict
        optimizer.state.<FQN>.<name>    the state of an optimizer for a parameter
        optimizer.param_groups.<FQN>.<name>    learning rate, decay and so on of the parameter's group
        others.<number>                 schedulers, scalers and all else with a `state_dict`, in the order given
        extra.<name>                    what the caller adds
        random.<device type>            the default generator of the pipeline's first rank, on that rank alone
        steps                           how many training calls the pipeline has made
    Entries of several ranks are equal. The values of `others` and `extra` are written as text that
    `torch.load(weights_only=True)` can read back, so that no class is named in a checkpoint.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from graphpp.errors import CheckpointError

# By FQN: as a list of groups, the groups of several ranks would overwrite each other.
_BY_FQN = StateDictOptions(flatten_optimizer_state_dict=True)


class Trained(Protocol):
    """The pipeline, as far as a checkpoint needs it."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's entries of the model's state dict."""

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's entries into the model."""


class RankCalls(Protocol):
    """The calls of a pipeline on this rank, as far as a checkpoint needs them."""

    steps: int

    @property
    def file_group(self) -> dist.ProcessGroup | None:
        """A process group of the pipeline's ranks for checkpoints; None for one process."""

    def watched(self) -> AbstractContextManager[None]:
        """A context around a call of all ranks."""

    def all_do(self, what: str, work: Callable[[], None]) -> None:
        """Do `work` on every rank, and go on when all have done it."""

    def replicas_wait(self, what: str) -> None:
        """Go on when all replicas have come to this call."""


@dataclass(frozen=True)
class TrainingState:
    """A pipeline's training as it is now: `state_dict` reads it, `load_state_dict` restores it.

    `first`: whether this is the pipeline's first rank; `calls` counts the training calls.
    """

    pipeline: Trained
    model: nn.Module
    optimizers: Sequence[Optimizer]
    others: Sequence[Stateful]
    extra: dict[str, Any]
    device: torch.device
    first: bool
    calls: RankCalls

    def state_dict(self) -> dict[str, Any]:
        """This rank's entries. Tensors of the model are the model's own memory."""
        entries: dict[str, Any] = {
            "model": self.pipeline.state_dict(),
            "others": {str(at): as_text(f"argument {at}", each.state_dict()) for at, each in enumerate(self.others)},
            "extra": {name: as_text(f"extra[{name!r}]", _state_of(value)) for name, value in self.extra.items()},
            "steps": self.calls.steps,
        }
        if self.optimizers:
            with _without_empty_groups(self.optimizers):
                entries["optimizer"] = get_optimizer_state_dict(self.model, self.optimizers, options=_BY_FQN)
        if self.first:
            entries["random"] = {type_: generator.get_state() for type_, generator in self._generators()}
        return entries

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's part."""
        self.pipeline.load_state_dict(state["model"])
        if self.optimizers:
            with _without_empty_groups(self.optimizers):
                set_optimizer_state_dict(self.model, self.optimizers, state["optimizer"], options=_BY_FQN)
        for at, each in enumerate(self.others):
            each.load_state_dict(from_text(f"argument {at}", state["others"][str(at)]))
        for name, value in self.extra.items():
            read = from_text(f"extra[{name!r}]", state["extra"][name])
            if isinstance(value, Stateful):
                value.load_state_dict(read)
            else:
                self.extra[name] = read
        for type_, generator in self._generators() if self.first else ():
            if type_ in state["random"]:
                generator.set_state(state["random"][type_])
        self.calls.steps = state["steps"]

    def _generators(self) -> Iterator[tuple[str, torch.Generator]]:
        yield "cpu", torch.default_generator
        if self.device.type == "cuda":
            yield "cuda", torch.cuda.default_generators[self.device.index or 0]


def as_text(name: str, value: Any) -> str:
    """A value of plain containers, numbers, strings and tensors as text. Raises `CheckpointError` for other classes."""
    written = io.BytesIO()
    torch.save(value, written)
    text = base64.b64encode(written.getvalue()).decode()
    from_text(name, text)
    return text


def from_text(name: str, text: str) -> Any:
    """The value that `as_text` wrote. Raises `CheckpointError` where it names a class."""
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as fault:
        raise CheckpointError(
            f"{name} of the checkpoint is no plain data, and reading it would run code: {str(fault).splitlines()[0]} "
            "Give dicts, lists, tuples, numbers, strings and tensors, or an object whose state_dict() has these alone"
        ) from fault


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


@contextmanager
def _without_empty_groups(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """A context in which the optimizers lack their groups without parameters, whose entries would have no FQN."""
    before = [list(optimizer.param_groups) for optimizer in optimizers]
    for optimizer, groups in zip(optimizers, before, strict=True):
        optimizer.param_groups[:] = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for optimizer, groups in zip(optimizers, before, strict=True):
            kept = iter(optimizer.param_groups)
            optimizer.param_groups[:] = [next(kept) if group["params"] else group for group in groups]


def check_stateful(arguments: Sequence[object]) -> tuple[list[Optimizer], list[Stateful]]:
    """The optimizers, and the other objects with a state. Raises `CheckpointError` for an object without one."""
    for at, each in enumerate(arguments):
        if not isinstance(each, Stateful):
            raise CheckpointError(
                f"argument {at} of pipe.checkpoint is {each!r}: give optimizers, schedulers, scalers and other objects with "
                "state_dict and load_state_dict; plain values go into extra={...}"
            )
    optimizers = [each for each in arguments if isinstance(each, Optimizer)]
    return optimizers, [cast(Stateful, each) for each in arguments if not isinstance(each, Optimizer)]
