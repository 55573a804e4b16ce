"""Optimizer state by parameter: tensors and plain values under the parameter's FQN, independent of the groups.

Each parameter has the entries
    <FQN>.state.<name>    each tensor of its state
    <FQN>.values          text (`safe_reading.py`): class of the optimizer, names of these tensors, other values of its state,
                          values of its group
Loading: `texts` names the text of each parameter, `check_texts` checks the loaded texts, `targets` allocates the tensors, and
`restore` fills the optimizers. A parameter saved without state has none afterwards. Parameters of one group must have been
saved with equal group values, and a parameter belongs to one optimizer.

Refused with `CheckpointError`: optimizers whose state is no mapping by parameter (LBFGS), or with parameters of another rank.
`torch.distributed.checkpoint.state_dict` is not used, since it takes an optimizer step to create the state of a new optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from graphpp._torch.parallel.sharded_tensor import local_of, with_local
from graphpp.checkpoint.safe_reading import as_text, class_in, from_text, is_state_of, state_text
from graphpp.errors import CheckpointError

_STATE, _VALUES = ".state.", ".values"
_ON_HOST = "step"  # optimizers keep this count on the host, unless their kernels need it on the device


@dataclass(frozen=True)
class Part:
    """A parameter of this rank. `rows`: selects its rows in a tensor laid out as its flat parameter, if it has one."""

    fqn: str
    parameter: torch.Tensor
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None


Own = Mapping[int, Sequence[Part]]
"""This rank's parameters: by the `id` of a tensor that an optimizer may hold, the parameters in it."""


def check(optimizers: Sequence[Optimizer], own: Own) -> None:
    seen: set[str] = set()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise CheckpointError(f"{name} keeps one state for all parameters, which belongs to no parameter by name")
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise CheckpointError(
                        f"{name} holds a parameter of shape {list(parameter.shape)} in group {number} which this rank does not "
                        "train: make the optimizer of pipe.parameters()"
                    )
                for part in own[id(parameter)]:
                    if part.fqn in seen:
                        raise CheckpointError(f"{part.fqn} is in two optimizers of the checkpoint: give it to one")
                    seen.add(part.fqn)


def entries(optimizers: Sequence[Optimizer], own: Own) -> dict[str, Any]:
    """The entries of this rank's optimizers. Tensors are the optimizers' own memory."""
    found: dict[str, Any] = {}
    for part, optimizer, group, parameter in _parameters(optimizers, own):
        fqn, state = part.fqn, optimizer.state.get(parameter, {})
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        found |= {f"{fqn}{_STATE}{name}": _part_of(value, part, parameter) for name, value in tensors.items()}
        values = {name: value for name, value in state.items() if name not in tensors}
        group_values = {name: value for name, value in group.items() if name != "params"}
        about = f"the group of {fqn} in {type(optimizer).__name__}"
        found[f"{fqn}{_VALUES}"] = state_text(about, optimizer, [sorted(tensors), values, group_values])
    return found


def first_state(optimizers: Sequence[Optimizer], own: Own) -> dict[str, torch.Tensor]:
    """Tensor entries as a first step would make them, for parameters without state: memory for values to be loaded.

    A copy of the optimizer steps a stand-in of one parameter at a time. An optimizer whose copy cannot step has none here.
    """
    found: dict[str, torch.Tensor] = {}
    for part, optimizer, group, parameter in _parameters(optimizers, own):
        if not parameter.requires_grad or optimizer.state.get(parameter):
            continue
        stand_in, copied = torch.zeros_like(parameter, requires_grad=True), copy.copy(optimizer)
        stand_in.grad = torch.zeros_like(stand_in)
        copied.state, copied.param_groups = defaultdict(dict), [{**group, "params": [stand_in]}]
        with suppress(Exception):  # an optimizer of the user's
            copied.step()
            state = {name: value for name, value in copied.state[stand_in].items() if isinstance(value, torch.Tensor)}
            found |= {f"{part.fqn}{_STATE}{name}": _part_of(value, part, parameter) for name, value in state.items()}
    return found


def texts(optimizers: Sequence[Optimizer], own: Own) -> dict[str, str]:
    """The empty text entry of each of this rank's parameters."""
    return {f"{part.fqn}{_VALUES}": "" for part, *_ in _parameters(optimizers, own)}


def check_texts(
    optimizers: Sequence[Optimizer], own: Own, loaded: Mapping[str, Any], *, other_classes: bool = False
) -> None:
    """Raise `CheckpointError` if a text is no plain data or (but for `other_classes`) an optimizer of another class wrote it.

    Also if parameters of a group have different group values.
    """
    groups: dict[int, tuple[str, str]] = {}
    for part, optimizer, group, _ in _parameters(optimizers, own):
        fqn = part.fqn
        text = as_text(fqn, _values(fqn, loaded)[2])
        if not is_state_of(optimizer, loaded[f"{fqn}{_VALUES}"]):
            if other_classes:
                continue
            raise CheckpointError(
                f"the optimizer of {fqn} in the checkpoint is of the class {class_in(loaded[f'{fqn}{_VALUES}'])}, and here of "
                f'{type(optimizer).__name__}: make it as it was when it was saved, or leave it as it is with allow="classes"'
            )
        first, known = groups.setdefault(id(group), (fqn, text))
        if known != text:
            raise CheckpointError(
                f"{first} and {fqn} are in one group of the optimizer, and the checkpoint has other values for their groups "
                "(learning rate, decay ..): group the parameters as they were when they were saved"
            )


def targets(
    optimizers: Sequence[Optimizer], own: Own, stored: Mapping[str, torch.Tensor], loaded: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Memory for the stored tensors of this rank's parameters. `loaded`: the texts.

    `stored`: a meta tensor for each tensor of the checkpoint, by entry. A state that was saved in the dtype of its parameter
    takes the parameter's dtype here.
    """
    by_parameter: dict[str, list[str]] = {}
    for entry in stored:
        if entry.startswith("optimizer."):
            by_parameter.setdefault(entry.rpartition(_STATE)[0], []).append(entry)
    found: dict[str, torch.Tensor] = {}
    for part, _, group, _ in _fitting(optimizers, own, loaded):
        parameter, saved = part.parameter, stored.get(f"model.{part.fqn}")
        for entry in by_parameter.get(f"optimizer.{part.fqn}", ()):
            counts, value = entry.endswith(f"{_STATE}{_ON_HOST}"), stored[entry]
            like = parameter if value.shape == parameter.shape and not counts else value  # sharded like the parameter
            on_host = counts and not (group.get("capturable") or group.get("fused"))
            dtype = parameter.dtype if saved is not None and saved.dtype == value.dtype and not counts else value.dtype
            device = "cpu" if on_host else parameter.device
            found[entry.removeprefix("optimizer.")] = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
    return found


def restore(optimizers: Sequence[Optimizer], own: Own, loaded: Mapping[str, Any]) -> None:
    """Fill the optimizers with loaded entries. Raises `CheckpointError`, and changes nothing, if one is missing."""
    check_texts(optimizers, own, loaded, other_classes=True)
    states: dict[int, dict[str, Any]] = {}
    for part, _, _, parameter in _fitting(optimizers, own, loaded):
        names, values, _ = _values(part.fqn, loaded)
        lacking = [name for name in names if f"{part.fqn}{_STATE}{name}" not in loaded]
        if lacking:
            raise CheckpointError(
                f"the state {lacking[0]!r} of {part.fqn} was saved and not loaded: torch.distributed.checkpoint.load fills the "
                "state that an optimizer has or makes in its first step, so load with pipe.checkpoint(...).load(folder)"
            )
        tensors = {name: loaded[f"{part.fqn}{_STATE}{name}"] for name in names}
        _join(states.setdefault(id(parameter), {}), {**tensors, **values}, part, parameter)
    for part, optimizer, group, parameter in _fitting(optimizers, own, loaded):
        group.update(_values(part.fqn, loaded)[2])
        optimizer.state.pop(parameter, None)
        if states[id(parameter)]:
            optimizer.state[parameter] = states[id(parameter)]


def _part_of(value: torch.Tensor, part: Part, parameter: torch.Tensor) -> torch.Tensor:
    """The rows of `part` in a state tensor of the parameter that the optimizer has."""
    if part.rows is None or value.shape != parameter.shape:
        return value
    return with_local(part.parameter, part.rows(value))


def _join(state: dict[str, Any], loaded: Mapping[str, Any], part: Part, parameter: torch.Tensor) -> None:
    """Add the loaded values of `part` to the state of its (flat) parameter.

    Raises `CheckpointError` if parts of a flat parameter disagree, such as about the count of steps.
    """
    for name, value in loaded.items():
        by_element = isinstance(value, torch.Tensor) and value.shape == part.parameter.shape and name != _ON_HOST
        if part.rows is not None and by_element:
            local = local_of(value)
            flat = state.setdefault(name, torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False))
            part.rows(flat).copy_(value if local is None else local)
        elif not _equal(state.setdefault(name, value), value):
            raise CheckpointError(
                f"{part.fqn} was saved with another {name} than the parameters that share a flat one with it: make the "
                "optimizer of pipe.parameters()"
            )


def _equal(one: Any, other: Any) -> bool:
    return one is other or (torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other))


def _values(fqn: str, loaded: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Parsed text of a parameter: names of its state's tensors, other values of its state, values of its group."""
    names, values, group = from_text(fqn, loaded[f"{fqn}{_VALUES}"])
    return names, values, group


def _parameters(
    optimizers: Sequence[Optimizer], own: Own
) -> Iterator[tuple[Part, Optimizer, dict[str, Any], torch.Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for part in own[id(parameter)]:
                    yield part, optimizer, group, parameter


def _fitting(
    optimizers: Sequence[Optimizer], own: Own, loaded: Mapping[str, Any]
) -> Iterator[tuple[Part, Optimizer, dict[str, Any], torch.Tensor]]:
    """The parameters whose optimizer is of the class that saved their state."""
    return (each for each in _parameters(optimizers, own) if is_state_of(each[1], loaded[f"{each[0].fqn}{_VALUES}"]))
