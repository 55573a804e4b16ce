"""Give this rank's part of a model on the meta device memory and values.

Contract
--------
- Memory is made for this rank's parameters and buffers that have none, on the rank's device; on the first rank also for tensors
  that no stage reads. New parameter objects take the places of the old ones, under all their names, with their attributes.
- Values come from code that initialises the model (`initialize.py`), or from a checkpoint on disk (`weight_files.py`) and, for
  tensors that no state dict holds, from such code. A tensor that nothing has written is refused.
- `Materials.fill` changes the model on this rank only; `undo` puts the former tensors back. Errors are `GraphPPError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import nn

from graphpp._torch.autograd import has_gradient_hooks
from graphpp.arguments import TEXT, callback
from graphpp.errors import CheckpointError, GraphPPError
from graphpp.pipeline.ownership.borrowed_memory import BorrowedMemory, poison
from graphpp.pipeline.ownership.initialize import Initializer, check_written, initialize, reset
from graphpp.pipeline.ownership.weight_files import Weights, check_fits, open_weights
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.released import forget, like

_UNWRITTEN = (
    "Give pipe.materialize(init) a function that writes them; it is called with each module, children first, and by default "
    "calls the module's reset_parameters"
)


@dataclass(frozen=True)
class Source:
    """Where values come from: the arguments of `Pipeline.materialize`."""

    init: Initializer | None
    weights: Path | None
    names: Callable[[str], str] | None
    seed: int | None
    strict: bool

    def describe(self, device: torch.device) -> dict[str, list[str]]:
        """Lines that all ranks must have alike; without a seed, also the state of the generators."""
        lines = {"the arguments of materialize": [f"{name}={_shown(value)}" for name, value in vars(self).items()]}
        if self.weights is None and self.seed is None:
            states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
            digests = [hashlib.sha256(state.numpy().tobytes()).hexdigest()[:16] for state in states]
            lines["the state of the random numbers (call torch.manual_seed on every rank before, or give seed=)"] = digests
        return lines


class Materials:
    """The tensors of a model before and after they get memory."""

    def __init__(self, model: nn.Module, state: ModelState, device: torch.device) -> None:
        self._model, self._state, self._device = model, state, device
        self._stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
        self._before = [dict(store) for store in self._stores]

    def undo(self) -> None:
        """Put the tensors back that the model had at first."""
        for store, before in zip(self._stores, self._before, strict=True):
            store.clear()
            store.update(before)  # type: ignore[arg-type]

    def fill(self, needed: Collection[str], unread: Collection[str], source: Source) -> None:
        """Give `needed` memory and values; and `unread`, where the source has values for them."""
        old = {fqn: self._state.tensor(fqn) for fqn in (*needed, *unread) if self._state.tensor(fqn).is_meta}
        _check_hooks(old)
        weights = None if source.weights is None else open_weights(source.weights)
        in_files = {} if weights is None else self._matched(weights, old, needed, source)
        filled = {fqn: tensor for fqn, tensor in old.items() if weights is None or fqn in in_files or fqn in needed}
        new = {fqn: like(tensor, _blank(tensor, self._device)) for fqn, tensor in filled.items()}
        self._state.exchange({id(filled[fqn]): tensor for fqn, tensor in new.items()})
        computed = [fqn for fqn in new if fqn not in in_files]
        if computed:
            for fqn in computed:
                poison(new[fqn])
            self._initialize([new[fqn] for fqn in computed], source)
            check_written(self._model, {fqn: self._state.tensor(fqn) for fqn in computed}, _UNWRITTEN)
        if weights is not None:
            weights.copy({name: self._state.tensor(fqn) for fqn, name in in_files.items()})
        forget(((tensor, fqn) for fqn, tensor in filled.items()), "pipe.materialize has put others in their places")

    def _initialize(self, computed: Collection[torch.Tensor], source: Source) -> None:
        """Run the code that initialises the model, with memory lent to all tensors that are still on the meta device."""
        lent = BorrowedMemory(self._device)
        tensors = {id(tensor): tensor for store in self._stores for tensor in store.values() if tensor is not None}
        others = {key: (tensor, lent.like(tensor)) for key, tensor in tensors.items() if tensor.is_meta}
        self._state.exchange({key: borrowed for key, (_, borrowed) in others.items()})
        seed = 0 if source.weights is not None and source.seed is None else source.seed
        initialize(self._model, source.init or reset, {id(tensor) for tensor in computed}, lent, seed, self._device)
        self._state.exchange({id(borrowed): tensor for tensor, borrowed in others.values()})

    def _matched(
        self, weights: Weights, tensors: Mapping[str, torch.Tensor], needed: Collection[str], source: Source
    ) -> dict[str, str]:
        """The name in the files for each of `tensors` that has one, by FQN.

        Raises `CheckpointError` if one does not fit, or (strict) if the files lack a needed tensor or have one that the model
        lacks.
        """
        stored, entries = weights.stored(), self._state.entries()
        name_of = callback(CheckpointError, "names", TEXT, source.names) if source.names is not None else str
        names = {key: name_of(key) for key, value in entries.items() if isinstance(value, torch.Tensor)}
        keys: dict[int, list[str]] = {}
        for key in names:
            keys.setdefault(id(entries[key]), []).append(key)
        found, missing = dict[str, str](), list[str]()
        for fqn, tensor in tensors.items():
            aliases = keys.get(id(tensor), [])
            name = next((names[key] for key in aliases if names[key] in stored), None)
            if name is not None:
                found[fqn] = name
                value = stored[name]
                if value is not None and source.weights is not None:
                    check_fits(source.weights, name, value, tensor)
            elif aliases and fqn in needed:
                missing.append(names[aliases[0]])
        if source.strict:
            _check_names(source, stored, set(names.values()), missing)
        return found


def _shown(value: object) -> str:
    """A value in words that are the same on all ranks."""
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else str(value)


def _blank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _check_names(source: Source, stored: Collection[str], names: Collection[str], missing: list[str]) -> None:
    """Raise `CheckpointError` for names that only the model has, or only the files."""
    advice = "names= maps a key of the model's state dict to a name in the files, and strict=False takes what fits"
    if missing:
        raise CheckpointError(
            f"{source.weights} lacks {len(missing)} tensors that this rank needs: {', '.join(missing[:3])}. It has "
            f"{len(stored)}, such as {', '.join(sorted(stored)[:3])}; {advice}"
        )
    common = _common_parts(names)
    unknown = [name for name in stored if name.split(".")[: len(common)] == common and name not in names]
    if unknown:
        listed = ", ".join(unknown[:3])
        raise CheckpointError(f"{source.weights} has {len(unknown)} tensors that the model lacks: {listed}; {advice}")


def _common_parts(names: Collection[str]) -> list[str]:
    """The leading parts, between dots, that all names have in common: of a checkpoint of more than a model, the model's."""
    first, last = min(names).split("."), max(names).split(".")
    return [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))]


def _check_hooks(tensors: Mapping[str, torch.Tensor]) -> None:
    for fqn, tensor in tensors.items():
        if has_gradient_hooks(tensor):
            raise GraphPPError(f"{fqn} has a gradient hook, and materialize makes a new parameter: register hooks afterwards")
