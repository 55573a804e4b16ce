"""The contents of a checkpoint, by name and independent of ranks, stages and schedule.

`TrainingState` reads and restores this rank's part of a training. Its entries:
    model.<key>                 the rank's parameters and buffers, under every key of the model's state dict
    optimizer.<FQN>...          optimizer state of a parameter, and the values of its group (`optimizer_state.py`)
    others.<number>             class and state of other objects, such as schedulers and scalers, in the given order
    extra.<name>                values that the caller adds
    random.<device type>        the default generator of the pipeline's first rank, which all ranks read
    steps                       the number of training calls of the pipeline
Entries that several ranks have are equal; ranks compare the texts of `alike`. Values other than tensors are plain data. Errors
are `CheckpointError`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphpp.checkpoint import optimizer_state
from graphpp.checkpoint.optimizer_state import Part
from graphpp.checkpoint.safe_reading import as_text, class_in, from_text, is_state_of, state_text
from graphpp.errors import CheckpointError

_EXTRA_STATE = "_extra_state"  # torch's key for the result of a module's `get_extra_state`


class Trained(Protocol):
    """The part of a pipeline that a checkpoint needs."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's entries of the model's state dict."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of this rank's stages."""

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's entries into the model."""


class RankCalls(Protocol):
    """The part of a pipeline's calls on this rank that a checkpoint needs."""

    steps: int
    saving: str | None  # the folder of an asynchronous save, until `wait` is called

    @property
    def file_group(self) -> dist.ProcessGroup | None:
        """The pipeline's process group for checkpoints; None for one process."""

    @property
    def file_group_of_all(self) -> dist.ProcessGroup | None:
        """The process group of all ranks of all replicas for checkpoints; None for one process."""

    def watched(self) -> AbstractContextManager[None]:
        """A context around a call of all ranks."""

    def all_ranks(
        self, what: str, alike: Mapping[str, Sequence[str]] = ...
    ) -> AbstractContextManager[dict[str, Sequence[str]]]:
        """A context around work of every rank; the yielded lines must be equal on all ranks at its end."""

    def all_replicas(self, what: str) -> AbstractContextManager[None]:
        """A context around work of every replica."""


def check_not_saving(calls: RankCalls) -> None:
    """Raise `CheckpointError` if an asynchronous save is not over."""
    if calls.saving is not None:
        raise CheckpointError(f"the asynchronous save into {calls.saving} is not over: call wait() of its result")


@dataclass(frozen=True)
class TrainingState:
    """A pipeline's current training state.

    `model_keys` returns the keys of the whole model's state dict, `check_listed` raises if they lack a tensor of this rank;
    `first`: whether this is the pipeline's first rank; `flat_parts` returns the flat parameters.
    """

    pipeline: Trained
    model_keys: Callable[[], Collection[str]]
    check_listed: Callable[[], None]
    optimizers: Sequence[Optimizer]
    others: Sequence[Stateful]
    extra: dict[str, Any]
    device: torch.device
    first: bool
    calls: RankCalls
    flat_parts: Callable[[], optimizer_state.Own] = dict

    def entries(self) -> dict[str, Any]:
        """This rank's entries. Tensors are the memory of the model and of the optimizers."""
        own = self._own()
        optimizer_state.check(self.optimizers, own)
        found: dict[str, Any] = {
            "model": self._model_entries(),
            "optimizer": optimizer_state.entries(self.optimizers, own),
            **self._texts(),
            "steps": self.calls.steps,
        }
        if self.first:
            found["random"] = {type_: generator.get_state() for type_, generator in self._generators()}
        return found

    def first_optimizer_state(self) -> dict[str, torch.Tensor]:
        """Memory for the state of optimizers that have not made a step yet, as entries."""
        return optimizer_state.first_state(self.optimizers, self._own())

    def alike(self) -> dict[str, list[str]]:
        """Digests of the entries that all ranks must agree on, by their names in errors."""
        texts = self._texts()
        others = {
            f"the state of the {type(each).__name__} of the checkpoint": [_digest(texts["others"][str(at)])]
            for at, each in enumerate(self.others)
        }
        extra = {f"extra[{name!r}] of the checkpoint": [_digest(text)] for name, text in texts["extra"].items()}
        return {**others, **extra, "the training calls": [str(self.calls.steps)]}

    def plain_targets(self) -> dict[str, Any]:
        """This rank's entries other than tensors, empty: the first part of a load."""
        own = self._own()
        optimizer_state.check(self.optimizers, own)
        return {
            "optimizer": optimizer_state.texts(self.optimizers, own),
            "others": {str(at): "" for at in range(len(self.others))},
            "extra": dict.fromkeys(self.extra, ""),
            "steps": 0,
        }

    def check_plain(self, loaded: Mapping[str, Any], allowed: Collection[str] = ()) -> None:
        """Raise `CheckpointError` if a loaded entry other than a tensor does not fit; changes nothing."""
        optimizer_state.check_texts(self.optimizers, self._own(), loaded["optimizer"], other_classes="classes" in allowed)
        for name, text in loaded["extra"].items():
            from_text(f"extra.{name}", text)
        for at, each in enumerate(self.others):
            text, name, ours = loaded["others"][str(at)], f"others.{at}", type(each).__name__
            state = from_text(name, text)
            if not is_state_of(each, text):
                if "classes" in allowed:
                    continue
                raise CheckpointError(
                    f"{name} of the checkpoint is of the class {class_in(text)}, and here of {ours}: give the objects in the "
                    f'order in which they were saved, or leave the {ours} as it is with allow="classes"'
                )
            differs = "" if "settings" in allowed else _other_setting(each, state)
            if differs:
                raise CheckpointError(
                    f"{name} of the checkpoint, a {ours}, {differs}: give the schedulers in the order and with the settings "
                    'with which they were saved, or take those of the checkpoint with allow="settings"'
                )

    def tensor_targets(self, stored: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
        """Memory for this rank's tensors: the model's own, new memory for optimizers; `stored`: as for `optimizer_state`."""
        found: dict[str, Any] = {
            "model": self._model_entries(),
            "optimizer": optimizer_state.targets(self.optimizers, self._own(), stored, plain["optimizer"]),
        }
        found["random"] = {type_: generator.get_state() for type_, generator in self._generators()}
        return found

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Restore loaded entries; the model's tensors may be loaded already."""
        others = {at: from_text(f"others.{at}", text) for at, text in loaded["others"].items()}
        extra = {name: from_text(f"extra[{name!r}]", text) for name, text in loaded["extra"].items()}
        optimizer_state.restore(self.optimizers, self._own(), loaded["optimizer"])
        self.pipeline.load_state_dict(loaded["model"])
        for at, each in enumerate(self.others):
            if is_state_of(each, loaded["others"][str(at)]):
                each.load_state_dict(others[str(at)])
        for name, value in list(self.extra.items()):
            if isinstance(value, Stateful):
                value.load_state_dict(extra[name])
            else:
                self.extra[name] = extra[name]
        for type_, generator in self._generators():
            if type_ in loaded["random"]:
                generator.set_state(loaded["random"][type_])
        self.calls.steps = loaded["steps"]

    def _own(self) -> optimizer_state.Own:
        own = {id(parameter): [Part(fqn, parameter)] for fqn, parameter in self.pipeline.named_parameters()}
        return {**own, **self.flat_parts()}

    def _model_entries(self) -> dict[str, torch.Tensor]:
        entries: dict[str, torch.Tensor] = self.pipeline.state_dict()
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor) or key.rpartition(".")[2] == _EXTRA_STATE:
                raise CheckpointError(
                    f"{key} of the model's state dict is no parameter or buffer (get_extra_state): give the module's state in "
                    "extra={...}"
                )
            if value.is_meta:
                raise CheckpointError(f"{key} is on the meta device: call pipe.materialize first, on all ranks")
        self.check_listed()
        return entries

    def _texts(self) -> dict[str, dict[str, str]]:
        extra = {name: value.state_dict() if isinstance(value, Stateful) else value for name, value in self.extra.items()}
        return {
            "others": {str(at): state_text(f"others.{at}", each, each.state_dict()) for at, each in enumerate(self.others)},
            "extra": {name: as_text(f"extra[{name!r}]", value) for name, value in extra.items()},
        }

    def _generators(self) -> Iterator[tuple[str, torch.Generator]]:
        yield "cpu", torch.default_generator
        if self.device.type == "cuda":
            yield "cuda", torch.cuda.default_generators[self.device.index or 0]


def _other_setting(each: Stateful, state: Any) -> str:
    """The first setting that a scheduler's state has otherwise than the scheduler, in words; empty if none.

    The settings are the base learning rates and the arguments of the scheduler's class.
    """
    if not isinstance(each, LRScheduler):
        return ""
    own = each.state_dict()
    for name in ("base_lrs", *inspect.signature(type(each)).parameters):
        if name in own and name in state and name != "last_epoch" and as_text(name, own[name]) != as_text(name, state[name]):
            return f"has {name}={state[name]!r}, and here {own[name]!r}"
    return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_stateful(arguments: Sequence[object], extra: Mapping[Any, Any]) -> tuple[list[Optimizer], list[Stateful]]:
    """The optimizers, and the other objects. Raises `CheckpointError` for an object without a state."""
    for at, each in enumerate(arguments):
        if not isinstance(each, Stateful) or isinstance(each, type):
            raise CheckpointError(
                f"argument {at} of pipe.checkpoint is {each!r}: give optimizers, schedulers, scalers and other objects with "
                "state_dict and load_state_dict; plain values go into extra={...}"
            )
    for name in extra:
        if not isinstance(name, str):
            raise CheckpointError(f"extra: the names of values are strings, got {name!r}")
    optimizers = [each for each in arguments if isinstance(each, Optimizer)]
    return optimizers, [cast(Stateful, each) for each in arguments if not isinstance(each, Optimizer)]
