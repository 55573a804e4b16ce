"""Allocate and fill this rank's part of a model that is on the meta device.

- Memory is allocated on the rank's device for its parameters and buffers on the meta device, and for such tensors that no stage
  reads. New parameters replace the old ones under all their names, with their attributes.
- Values come from code that initialises the model (`initialize.py`), or from a checkpoint (`weight_files.py`) and, for tensors
  that no state dict contains, from such code. Unwritten tensors are refused, and code that changes a dtype or shape.
- Of a parameter that will be sharded, or that `tp` shards, a rank keeps its part (`lent_memory.py`). The parameter is whole
  only while a call touches it or files are read: peak memory is the rank's parts plus the largest module or file tensor.
- If `Materials.fill` raises, `undo` restores tensors and generators on this rank, but not values overwritten in tensors that
  already had memory. Errors are `GraphPPError`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from graphpp._torch.autograd import has_gradient_hooks
from graphpp.arguments import TEXT, callback
from graphpp.errors import CheckpointError, GraphPPError
from graphpp.log import logger
from graphpp.ownership.freed_memory import trim_after
from graphpp.ownership.initialize import Initializer, default_generators, initialize, reset
from graphpp.ownership.lent_memory import LentMemory, ShardValues
from graphpp.ownership.unwritten import check_written, poison
from graphpp.ownership.weight_files import Weights, check_fits, open_weights
from graphpp.runtime.dtensors import local_tensor, spread_tensor
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.released import forget, is_released, like

_LOG = logger(__name__)
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
        """Lines that must be equal on all ranks; without a seed, these include the generator states."""
        lines = {"the arguments of materialize": [f"{name}={_shown(value)}" for name, value in vars(self).items()]}
        if self.weights is None and self.seed is None:
            states = [each.get_state().numpy() for each in default_generators(device)]
            digests = [hashlib.sha256(state.tobytes()).hexdigest()[:16] for state in states]
            lines["the state of the random numbers (call torch.manual_seed on every rank before, or give seed=)"] = digests
        return lines


class Materials:
    """The tensors of a model before and after materialization."""

    def __init__(self, model: nn.Module, state: ModelState, device: torch.device) -> None:
        self._model, self._state, self._device = model, state, device
        self._stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
        self._before = [dict(store) for store in self._stores]
        self._original: dict[int, torch.Tensor] = {}  # `id` of a new tensor -> the tensor that it replaced
        self._alive: list[torch.Tensor] = []  # the new tensors, so that no `id` is used twice
        self._generators = [(each, each.get_state()) for each in default_generators(device)]

    def undo(self) -> None:
        """Restore the model's first tensors, and the states of the generators."""
        self._state.exchange(self._original)
        for store, tensors in zip(self._stores, self._before, strict=True):
            store.clear()
            store.update(tensors)  # type: ignore[arg-type]
        for generator, state in self._generators:
            generator.set_state(state)

    def fill(
        self, needed: Collection[str], unread: Collection[str], source: Source, shards: ShardValues | None = None
    ) -> str:
        """Give `needed` memory and values, and `unread` where the source has values for them; returns the save of its files.

        `shards` gets the values of meta parameters that will be sharded; these stay on the meta device in the model.
        """
        held = {fqn: self._state.tensor(fqn) for fqn in (*needed, *unread)}
        old = {fqn: tensor for fqn, tensor in held.items() if tensor.is_meta}
        _check_replaceable(old)
        weights = None if source.weights is None else open_weights(source.weights)
        in_files = {} if weights is None else self._matched(weights, held, needed, source)
        filled = {fqn: tensor for fqn, tensor in old.items() if weights is None or fqn in in_files or fqn in needed}
        kept = [fqn for fqn in filled if shards is None or fqn not in shards]
        new = {fqn: like(filled[fqn], _blank(filled[fqn], self._device)) for fqn in kept}
        self._exchange([(filled[fqn], tensor) for fqn, tensor in new.items()])
        computed = [fqn for fqn in filled if fqn not in in_files]
        for fqn in computed:
            if fqn in new:
                poison(new[fqn])
        if weights is None or computed:
            self._initialize(held if weights is None else computed, source, shards)
        _check_kinds({fqn: (tensor, self._state.tensor(fqn)) for fqn, tensor in held.items()})
        check_written(self._model, self._not_in(shards, computed), _UNWRITTEN)
        if weights is not None:
            for round_ in _rounds(in_files):
                self._read(weights, round_, shards)
        forget(((filled[fqn], fqn) for fqn in new), "pipe.materialize has put others in their places")
        return "" if weights is None else weights.save

    def _not_in(self, shards: ShardValues | None, fqns: Iterable[str]) -> dict[str, torch.Tensor]:
        """The model's tensors `fqns`, except meta tensors whose values are complete in `shards`."""
        tensors = {fqn: self._state.tensor(fqn) for fqn in fqns}
        return {fqn: own for fqn, own in tensors.items() if shards is None or not own.is_meta or fqn not in shards.kept}

    def _read(self, weights: Weights, names: Mapping[str, str], shards: ShardValues | None) -> None:
        """Copy tensors from files. `names`: name in the files -> FQN."""
        tensors = {name: self._state.tensor(fqn) for name, fqn in names.items()}
        weights.copy({name: own for name, own in tensors.items() if not own.is_meta})
        if shards is not None:
            for some in _groups({name: own for name, own in tensors.items() if own.is_meta}):
                whole = {name: _blank(tensors[name], self._device) for name in some}
                weights.copy(whole)
                for name, values in whole.items():
                    shards.take(names[name], values)
                freed = sum(values.nbytes for values in whole.values())
                del whole, values
                trim_after(freed if self._device.type == "cpu" else 0)

    def _initialize(self, fqns: Iterable[str], source: Source, shards: ShardValues | None) -> None:
        """Run the initialising code, with memory lent to all tensors that are still on the meta device.

        `fqns`: the tensors whose values matter. If the code raises, the lent tensors stay in the model until `undo`.
        """
        lent = LentMemory(self._device, shards)
        names = {id(tensor): fqn for fqn, tensor in (*self._model.named_parameters(), *self._model.named_buffers())}
        blank = [tensor for tensor in self._tensors() if tensor.is_meta]
        borrowed = [(tensor, lent.like(tensor, names.get(id(tensor), "a tensor"))) for tensor in blank]
        self._exchange(borrowed)
        own = {id(self._state.tensor(fqn)) for fqn in fqns}
        seed = 0 if source.weights is not None and source.seed is None else source.seed
        initialize(self._model, source.init or reset, own, lent, seed, self._device)
        self._exchange([(copy, tensor) for tensor, copy in borrowed])

    def _exchange(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._original |= {id(new): self._original.get(id(former), former) for former, new in pairs}
        self._alive += [new for _, new in pairs]
        self._state.exchange({id(former): new for former, new in pairs})

    def _tensors(self) -> list[torch.Tensor]:
        found = {id(tensor): tensor for store in self._stores for tensor in store.values() if tensor is not None}
        return list(found.values())

    def _matched(
        self, weights: Weights, tensors: Mapping[str, torch.Tensor], needed: Collection[str], source: Source
    ) -> dict[str, str]:
        """FQN -> name in the files, for each of `tensors` that the files contain.

        Raises `CheckpointError` if a tensor does not fit, or (strict) if files lack a needed tensor or contain an unknown one.
        """
        stored, entries = weights.stored(), self._state.entries()
        self._state.check_listed(tensors)
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
        unknown = _unknown(stored, set(names.values()))
        _check_names(source, len(stored), found, missing, unknown)
        return found


def _shown(value: object) -> str:
    """Text for a value that is equal on all ranks."""
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else str(value)


def _blank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Groups of tensor names to read at once, each at most as large as the largest tensor."""
    most, group, size = max((each.nbytes for each in tensors.values()), default=0), list[str](), 0
    for name, tensor in tensors.items():
        if group and size + tensor.nbytes > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor.nbytes
    if group:
        yield group


def _check_names(
    source: Source, stored: int, found: Collection[str], missing: Sequence[str], unknown: Sequence[str]
) -> None:
    """Raise `CheckpointError` for names only in the model or only in the files; not strict: only if no name fits."""
    lacks = f"{source.weights} lacks {len(missing)} tensors that this rank needs: {', '.join(missing[:3])}"
    extra = f"{source.weights} has {len(unknown)} tensors that the model lacks: {', '.join(unknown[:3])}"
    advice = "names= maps a key of the model's state dict to a name in the files, and strict=False takes what fits"
    if missing and (source.strict or not found):
        raise CheckpointError(f"{lacks}. {extra if unknown else f'It has {stored} tensors'}; {advice}")
    if unknown and source.strict:
        raise CheckpointError(f"{extra}; {advice}")
    for text, names in ((f"{lacks}; init writes them", missing), (f"{extra}; they are not read", unknown)):
        if names:
            _LOG.warning("%s", text)


def _unknown(stored: Collection[str], names: Collection[str]) -> list[str]:
    """Names in the files that the model lacks, limited to the common prefix of the model's names."""
    if not names:
        return []
    common = os.path.commonpath([name.replace(".", os.sep) for name in names]).replace(os.sep, ".")
    return [name for name in stored if name.startswith(f"{common}." if common else "") and name not in names]


def _check_replaceable(tensors: Mapping[str, torch.Tensor]) -> None:
    storages = {fqn: local_tensor(each).untyped_storage() for fqn, each in tensors.items() if not is_released(each)}
    first: dict[int, str] = {}
    for fqn, tensor in tensors.items():
        if not isinstance(tensor, nn.Parameter) and spread_tensor(tensor) is not None:
            raise GraphPPError(
                f"the buffer {fqn} is a DTensor on the meta device, and materialize fills whole buffers: give it memory and "
                "values before graphpp.compile"
            )
        if has_gradient_hooks(tensor):
            raise GraphPPError(f"{fqn} has a gradient hook, and materialize makes a new parameter: register hooks afterwards")
        other = first.setdefault(id(storages.get(fqn, tensor)), fqn)
        if tensors[other] is not tensor:
            raise GraphPPError(f"{other} and {fqn} share memory, and materialize would part them: make one a copy of the other")


def _check_kinds(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise `GraphPPError` if code replaced a tensor by one of another dtype, shape or class."""
    for fqn, (before, after) in pairs.items():
        if _kind(before) != _kind(after):
            raise GraphPPError(
                f"init has put a {type(after).__name__} of {list(after.shape)} {after.dtype} in the place of {fqn}, which is a "
                f"{type(before).__name__} of {list(before.shape)} {before.dtype}"
            )


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, isinstance(tensor, nn.Parameter)


def _rounds(in_files: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Name in the files -> FQN, in rounds that cover every FQN: several tensors may share a name."""
    left = dict(in_files)
    while left:
        round_ = {name: fqn for fqn, name in left.items()}
        yield round_
        for fqn in round_.values():
            del left[fqn]
