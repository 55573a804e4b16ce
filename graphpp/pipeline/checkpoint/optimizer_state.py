"""The state of optimizers by parameter: tensors and plain values under the parameter's FQN, whatever the groups are.

Contract
    `entries` reads the optimizers and changes nothing. Each parameter has
        <FQN>.state.<name>    each tensor of its state
        <FQN>.values          the names of these tensors, the other values of its state, and the values of its group, as text
                              (`plain_text.py`)
    `targets` makes the memory for a parameter's stored tensors, and `restore` puts the loaded entries into the optimizers, each
    parameter's alone: a parameter that had no state when it was saved has none afterwards. The parameters of one group must
    have been saved with equal values of their group. A parameter belongs to one optimizer.
    An optimizer whose state is no mapping by parameter, as that of LBFGS is not, or that holds a parameter of another rank is
    refused. Errors are `CheckpointError`.

`torch.distributed.checkpoint.state_dict` is not used: it makes the state of a new optimizer by a step of that optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from graphpp.errors import CheckpointError
from graphpp.pipeline.checkpoint.plain_text import as_text, from_text

_STATE, _VALUES = ".state.", ".values"
_ON_HOST = "step"  # a count that optimizers keep on the host, unless their kernels need it on the device


def check(optimizers: Sequence[Optimizer], own: Mapping[int, str]) -> None:
    """Raise `CheckpointError` for an optimizer that cannot be saved. `own`: the FQN of each parameter of this rank, by `id`."""
    seen: set[int] = set()
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
                if id(parameter) in seen:
                    raise CheckpointError(f"{own[id(parameter)]} is in two optimizers of the checkpoint: give it to one")
                seen.add(id(parameter))


def entries(optimizers: Sequence[Optimizer], own: Mapping[int, str]) -> dict[str, Any]:
    """The entries of this rank's optimizers. Tensors are the optimizers' own memory."""
    found: dict[str, Any] = {}
    for fqn, optimizer, group, parameter in _parameters(optimizers, own):
        state = optimizer.state.get(parameter, {})
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        found |= {f"{fqn}{_STATE}{name}": value for name, value in tensors.items()}
        values = {name: value for name, value in state.items() if name not in tensors}
        group_values = {name: value for name, value in group.items() if name != "params"}
        about = f"the group of {fqn} in {type(optimizer).__name__}"
        found[f"{fqn}{_VALUES}"] = as_text(about, [sorted(tensors), values, group_values])
    return found


def targets(
    optimizers: Sequence[Optimizer], own: Mapping[int, str], stored: Mapping[str, torch.Tensor | None]
) -> dict[str, Any]:
    """Memory for the entries of this rank's parameters. `stored`: each stored entry, a tensor as an empty one of its shape."""
    by_parameter: dict[str, list[str]] = {}
    for name in stored:
        by_parameter.setdefault(name.partition(_STATE)[0], []).append(name)
    found: dict[str, Any] = {}
    for fqn, _, group, parameter in _parameters(optimizers, own):
        found[f"{fqn}{_VALUES}"] = ""
        for name in by_parameter.get(fqn, ()):
            like = stored[name]
            if like is not None:
                on_host = name.endswith(f"{_STATE}{_ON_HOST}") and not (group.get("capturable") or group.get("fused"))
                found[name] = torch.empty_like(like, device="cpu" if on_host else parameter.device)
    return found


def restore(optimizers: Sequence[Optimizer], own: Mapping[int, str], loaded: Mapping[str, Any]) -> None:
    """Put loaded entries into the optimizers; nothing changes if a group does not fit."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            fqn, _, key = name.partition(_STATE)
            tensors.setdefault(fqn, {})[key] = value
    values = {fqn: from_text(fqn, loaded[f"{fqn}{_VALUES}"]) for fqn, *_ in _parameters(optimizers, own)}
    groups: dict[int, tuple[str, str, dict[str, Any]]] = {}
    for fqn, _, group, _ in _parameters(optimizers, own):
        names, _, of_group = values[fqn]
        lacking = [name for name in names if name not in tensors.get(fqn, {})]
        if lacking:
            raise CheckpointError(
                f"the state {lacking[0]!r} of {fqn} was saved and not loaded: torch.distributed.checkpoint.load fills the "
                "state that an optimizer has already, so load with pipe.checkpoint(...).load(folder)"
            )
        first, text, _ = groups.setdefault(id(group), (fqn, as_text(fqn, of_group), of_group))
        if text != as_text(fqn, of_group):
            raise CheckpointError(
                f"{first} and {fqn} are in one group of the optimizer, and the checkpoint has other values for their groups "
                "(learning rate, decay ..): group the parameters as they were when they were saved"
            )
    for fqn, optimizer, group, parameter in _parameters(optimizers, own):
        group.update(groups[id(group)][2])
        state = {**tensors.get(fqn, {}), **values[fqn][1]}
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state


def _parameters(
    optimizers: Sequence[Optimizer], own: Mapping[int, str]
) -> Iterator[tuple[str, Optimizer, dict[str, Any], torch.Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield own[id(parameter)], optimizer, group, parameter
