"""The model's parameters and buffers by FQN, which a rank's stages read and update and its optimizer steps.

- Each tensor has one name, the first in the model's order. The objects are the model's own, moved to the device in place.
- `tensor(fqn)` reads the module's attribute at each call, so a parameter object that the user has replaced is seen.
- A rank's state dict is a part of the model's: every alias of a tensor, and no non-persistent buffer.
- A tensor on the meta device has no values and cannot run: `GraphPPError` says how to materialize it.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphpp.arguments import FLAG, MAPPING, Accepted, require
from graphpp.errors import CheckpointError, GraphPPError
from graphpp.runtime.dtensors import keep_part, local_tensor, part_of, spread_tensor
from graphpp.runtime.parameter_rows import whole_name
from graphpp.runtime.released import forget, is_released, released

_TENSOR = Accepted(
    "a tensor or a NumPy array", lambda value: isinstance(value, torch.Tensor) or type(value).__module__ == "numpy"
)


class ModelState:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = [name for name, _ in model.named_parameters()]
        self.buffers = [name for name, _ in model.named_buffers()]
        self.positions = {name: position for position, name in enumerate(self.parameters)}
        first: dict[int, tuple[nn.Module, str]] = {}
        for module in model.modules():
            for name, value in own_tensors(module):
                first.setdefault(id(value), (module, name))
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._owners = {name: first[id(value)] for name, value in tensors}

    def tensor(self, fqn: str) -> torch.Tensor:
        """The model's tensor; of the name of some rows (`parameter_rows.py`), the whole parameter."""
        module, attribute = self._owners[whole_name(fqn)]
        found = module._parameters.get(attribute)
        if found is None:
            found = getattr(module, attribute)
        assert isinstance(found, torch.Tensor)
        return found

    def reader(self, fqns: Iterable[str]) -> TensorReader:
        """A callable that reads these tensors, for a caller that reads them in each step."""
        names = tuple(fqns)
        return TensorReader(self, names, tuple(self._owners[whole_name(fqn)] for fqn in names))

    def named(self, fqns: Collection[str], among: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((fqn, self.tensor(fqn)) for fqn in among if fqn in fqns)

    def move(self, fqns: Iterable[str], device: torch.device) -> None:
        for fqn in fqns:
            tensor = self.tensor(fqn)
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(device)

    def release(self, holders: Mapping[str, int]) -> int:
        """Replace tensors by stand-ins; returns the freed bytes. `holders`: the other rank that has each tensor, by FQN."""
        replaced = {fqn: (self.tensor(fqn), rank) for fqn, rank in holders.items() if not is_released(self.tensor(fqn))}
        stand_ins = {id(tensor): released(tensor, fqn, rank) for fqn, (tensor, rank) in replaced.items()}
        for tensor, _ in replaced.values():
            keep_part(stand_ins[id(tensor)], tensor)
        self.exchange(stand_ins)
        forget(((tensor, fqn) for fqn, (tensor, _) in replaced.items()), "other ranks train them, here they only take memory")
        return sum(local_tensor(tensor).nbytes for tensor, _ in replaced.values() if not tensor.is_meta)

    def exchange(self, new: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors under all names, in lists of modules, and in weak references. `new`: by the old tensor's `id`."""
        for module in self._model.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if id(tensor) in new:
                        store[name] = new[id(tensor)]  # type: ignore[assignment]
            for kept in vars(module).values():
                if type(kept) is list:  # such as the flat weights of recurrent modules, and weak references to them
                    kept[:] = [_exchanged(each, new) for each in kept]

    def check_memory(self, fqns: Iterable[str]) -> None:
        """Raise `GraphPPError` if one of these tensors is on the meta device."""
        fqns = list(fqns)
        gone = [fqn for fqn in fqns if is_released(self.tensor(fqn))]
        if gone:
            raise GraphPPError(
                f"{len(gone)} tensors that this rank needs, {gone[0]} for one, have no values: a pipeline of this process that "
                "holds them on other ranks has given their memory back. Choose split= so that both pipelines have them on one "
                "rank, or compile the other pipeline with memory=graphpp.Memory(release=False)"
            )
        _refuse_meta([fqn for fqn in fqns if self.tensor(fqn).is_meta])

    def state_dict(self, fqns: Iterable[str]) -> dict[str, Any]:
        """The entries of the model's state dict with these tensors, under every alias, and the entries that are not tensors."""
        return self._own_entries(fqns, self.entries())

    def entries(self) -> dict[str, Any]:
        """The model's state dict with the tensor objects themselves, other ranks' tensors included."""
        return self._model.state_dict(keep_vars=True)

    def check_listed(self, fqns: Iterable[str]) -> None:
        """Raise `CheckpointError` if the model's state dict omits or copies a parameter or persistent buffer of `fqns`."""
        listed = {id(value) for value in self.entries().values()}
        passing = {id(module._buffers[name]) for module in self._model.modules() for name in module._non_persistent_buffers_set}
        for fqn in fqns:
            if id(self.tensor(fqn)) not in listed | passing:
                raise CheckpointError(f"the model's state_dict() leaves out or copies {fqn}: has the model a hook for this?")

    def _own_entries(self, fqns: Iterable[str], entries: Mapping[str, Any]) -> dict[str, Any]:
        mine = {id(self.tensor(fqn)) for fqn in fqns}
        local = {key: value for key, value in entries.items() if not isinstance(value, torch.Tensor) or id(value) in mine}
        return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in local.items()}

    def load(self, fqns: Collection[str], state: Mapping[str, Any], strict: bool) -> None:
        """Copy the entries of these tensors into the model, in place.

        Raises `GraphPPError`, and changes nothing, if an entry has another shape, is sparse or complex where the model's tensor
        is not, is on the meta device, or (with `strict`) is missing or unknown to the model.
        """
        require(GraphPPError, "state", MAPPING, state)
        require(GraphPPError, "strict", FLAG, strict)
        known = self.entries()
        mine = {key: value for key, value in self._own_entries(fqns, known).items() if isinstance(value, torch.Tensor)}
        if strict:
            missing = [key for key in mine if key not in state]
            unknown = [key for key in state if key not in known]
            _refuse(("missing", missing), ("unknown to the model", unknown))
        for key in mine:
            if key in state:
                require(GraphPPError, f"state[{key!r}]", _TENSOR, state[key])
        pairs = {key: (value, torch.as_tensor(state[key])) for key, value in mine.items() if key in state}
        shapes = {key: (list(new.shape), list(old.shape)) for key, (old, new) in pairs.items() if new.shape != old.shape}
        _refuse(("of another shape", [f"{key} {found} instead of {wanted}" for key, (found, wanted) in shapes.items()]))
        _refuse(("that cannot be copied", [key for key, (old, new) in pairs.items() if not _can_hold(old, new)]))
        _refuse_meta([key for key, (old, _) in pairs.items() if old.is_meta])
        parts = [(local_tensor(old), part_of(new, old)) for old, new in pairs.values()]
        with torch.no_grad():
            for own, part in parts:
                own.copy_(part)


class TensorReader:
    """Reads the same parameters and buffers in each step: `ModelState.tensor` of each of `fqns`, in order."""

    def __init__(self, state: ModelState, fqns: tuple[str, ...], owners: Sequence[tuple[nn.Module, str]]) -> None:
        self._state, self.fqns = state, fqns
        kinds = ("_parameters" if name in module._parameters else "_buffers" for module, name in owners)
        self._places = [(vars(module), kind, name) for (module, name), kind in zip(owners, kinds, strict=True)]

    def __call__(self) -> list[torch.Tensor]:
        try:
            found = [attributes[kind][name] for attributes, kind, name in self._places]
        except KeyError:  # the model has moved a tensor to another attribute store
            found = [None]
        return [self._state.tensor(fqn) for fqn in self.fqns] if any(each is None for each in found) else found


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers by attribute name. A wrapping model may list them under other FQNs."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _exchanged(kept: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """The item of a list, or a weak reference to a tensor, with the new tensor."""
    if type(kept) is weakref.ref:
        return weakref.ref(new[id(kept())]) if id(kept()) in new else kept
    return new.get(id(kept), kept)


def _can_hold(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `new` can be copied into `old`; only precision may be lost."""
    return new.layout is old.layout and not new.is_meta and (old.is_complex() or not new.is_complex())


def _refuse_meta(names: list[str]) -> None:
    if names:
        raise GraphPPError(
            f"{len(names)} tensors of this rank are on the meta device, {names[0]!r} for one: they have no values. "
            "Give them memory and values with pipe.materialize(init) or pipe.materialize(weights=folder), on all ranks."
        )


def _refuse(*faults: tuple[str, list[str]]) -> None:
    found = [f"{len(names)} entries {what}: {', '.join(map(str, names[:3]))}" for what, names in faults if names]
    if found:
        raise GraphPPError("the state dict does not fit this rank's part of the model: " + "; ".join(found))


@contextlib.contextmanager
def state_restored(model: nn.Module, device: torch.device, written: Collection[str] = ()) -> Iterator[None]:
    """A context that starts without gradients; its end restores buffers, gradients, attributes and random states of `model`.

    `written`: FQNs of tensors that a forward writes; frozen parameters among them are restored like buffers.
    """
    stores = [s for module in model.modules() for s in (module.__dict__, module._parameters, module._buffers)]
    copies = [(store, dict(store)) for store in stores]
    frozen = [parameter for name, parameter in model.named_parameters() if name in written]
    buffers = [(buffer, buffer.detach().clone()) for buffer in (*model.buffers(), *frozen) if not is_released(buffer)]
    grads = [(parameter, parameter.grad) for parameter in model.parameters() if not is_released(parameter)]
    python_state = random.getstate()
    try:
        for parameter, _ in grads:
            parameter.grad = None
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(python_state)
        for store, before in copies:
            store.clear()
            store.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, grad in grads:
            parameter.grad = grad


def tensor_lines(model: nn.Module) -> list[str]:
    """One line per parameter and buffer, for comparing ranks: FQN, shape, dtype, whether it is frozen."""
    parameters = [f"{name} {_meta(p)}{'' if p.requires_grad else ', frozen'}" for name, p in model.named_parameters()]
    return parameters + [f"{name} {_meta(buffer)}, buffer" for name, buffer in model.named_buffers()]


def _meta(tensor: torch.Tensor) -> str:
    part = spread_tensor(tensor)
    spread = "" if part is None else f", spread as {part.spread.placements}"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{spread}"
