"""Collect the whole model from its ranks: gathered on one rank, or written as safetensors for Hugging Face.

- `gathered`: all ranks iterate over the same entries in state-dict order. An entry's owner sends it, and the receiver copies it
  to host memory. Tensors under several keys are sent once; entries that no stage reads are equal on all ranks.
- `Export`: each rank writes the tensors that it is the first rank to own, so no tensor is sent. A tensor under several keys is
  written under the first. All ranks compute the same list of files.
- Files are written as those of a checkpoint (`checkpoint/in_progress.py`): they replace the weights of an earlier export at
  once, and weights of others are never changed. Each file has the name of its save. All ranks share one file system.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from graphpp.arguments import TEXT, callback
from graphpp.checkpoint.folder import begun
from graphpp.checkpoint.in_progress import WEIGHTS, WEIGHTS_INDEX, UnfinishedSave, remove_replaced, save_in
from graphpp.checkpoint.restore import without_os_errors
from graphpp.checkpoint.training_state import RankCalls
from graphpp.errors import CheckpointError, GraphPPError
from graphpp.ownership.weight_files import SAVE, save_of
from graphpp.parallel.rank_place import RankPlace
from graphpp.runtime.dtensors import is_over_stages, whole_tensor

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_PARTS = "model-*-of-*.safetensors"


@dataclass(frozen=True)
class Export:
    """The files of a model, each with at most `max_file_bytes`, or one tensor.

    `entries`: tensors by key, meta stand-ins for other ranks' tensors; `holders`: `id` of a tensor -> its rank, if not all
    ranks.
    """

    entries: Mapping[str, torch.Tensor]
    holders: Mapping[int, int]
    names: Callable[[str], str] | None
    dtype: torch.dtype | None
    max_file_bytes: int

    @cached_property
    def files(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """(writing rank, tensors by name) for each file. Raises `CheckpointError` if two tensors get one name."""
        files: list[tuple[int, dict[str, torch.Tensor]]] = []
        sizes: list[int] = []
        for rank, tensors in self._by_rank().items():
            files.append((rank, {}))
            sizes.append(0)
            for name, tensor in tensors.items():
                if files[-1][1] and sizes[-1] + self._bytes(tensor) > self.max_file_bytes:
                    files.append((rank, {}))
                    sizes.append(0)
                files[-1][1][name] = tensor
                sizes[-1] += self._bytes(tensor)
        return files

    def _by_rank(self) -> dict[int, dict[str, torch.Tensor]]:
        name_of = callback(CheckpointError, "names", TEXT, self.names) if self.names is not None else str
        found: dict[int, dict[str, torch.Tensor]] = {}
        keys: dict[str, str] = {}
        written: set[int] = set()
        for key, tensor in self.entries.items():
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"{key} of the model's state dict is no tensor: safetensors cannot hold it")
            if id(tensor) not in written:
                written.add(id(tensor))
                name = name_of(key)
                if keys.setdefault(name, key) != key:
                    raise CheckpointError(f"names: {keys[name]} and {key} would both be written as {name}")
                found.setdefault(self.holders.get(id(tensor), 0), {})[name] = tensor
        return dict(sorted(found.items()))

    def save(self, folder: Path, place: RankPlace, calls: RankCalls, check: Callable[[], None]) -> None:
        """Write all files into `folder`. Called by all ranks; of several replicas the first one writes.

        `check` raises if this rank's tensors cannot be written.
        """
        if not place.writes_files:
            return
        with calls.all_ranks(f"save_weights {folder}") as alike, without_os_errors():
            check()
            files = [f"rank {rank}: {', '.join(tensors)}" for rank, tensors in self.files]
            alike["the arguments of save_weights"] = [f"folder={folder}", f"dtype={self.dtype}", *files]
            if place.first_holder:
                _refuse_foreign(folder)
        with begun(folder, calls, first=place.first_holder) as save:
            with calls.all_ranks("its files"), without_os_errors():
                self._write(save, place.rank, writes=place.first_of_stage)
            with calls.all_ranks("its index"), without_os_errors():
                if place.first_holder:
                    self._publish(save)

    def _write(self, save: UnfinishedSave, rank: int, *, writes: bool) -> None:
        """Gather the tensors of a rank's files, and write them if `writes`."""
        for number, (writer, tensors) in enumerate(self.files):
            if writer != rank:
                for tensor in filter(is_over_stages, tensors.values()):
                    whole_tensor(tensor)  # the writer gathers the rows of all ranks
            else:
                blank = [name for name, tensor in tensors.items() if tensor.is_meta]
                if blank:
                    raise CheckpointError(f"{blank[0]} is on the meta device, and no stage reads it: give it values")
                ready = {name: self._converted(tensor) for name, tensor in tensors.items()}
                if not writes:
                    continue
                try:
                    save_file(ready, save.path / self._file(number, save.name), {"format": "pt", SAVE: save.name})
                except (KeyError, RuntimeError, ValueError) as fault:
                    keys = ", ".join(list(tensors)[:3])
                    raise CheckpointError(f"safetensors cannot hold {keys} ..: {type(fault).__name__}: {fault}") from fault

    def _publish(self, save: UnfinishedSave) -> None:
        """Write the index of several files, and replace the weights of an earlier export."""
        several = len(self.files) > 1
        if several:
            names = {name: self._file(number, save.name) for number, (_, tensors) in enumerate(self.files) for name in tensors}
            size = sum(self._bytes(tensor) for _, tensors in self.files for tensor in tensors.values())
            index = {"metadata": {"total_size": size, SAVE: save.name}, "weight_map": dict(sorted(names.items()))}
            (save.path / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
        _refuse_foreign(folder := save.folder)
        before = _heads(folder)
        save.publish(WEIGHTS_INDEX if several else WEIGHTS)
        other = WEIGHTS if several else WEIGHTS_INDEX
        if other in before and _heads(folder).get(other) == before[other]:
            (folder / other).unlink(missing_ok=True)
        remove_replaced(folder, _PARTS, lambda: _heads(folder).values())

    def _file(self, number: int, save: str) -> str:
        count = len(self.files)
        return WEIGHTS if count == 1 else f"model-{save}-{number + 1:05}-of-{count:05}.safetensors"

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _bytes(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * self._dtype(tensor).itemsize

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return whole_tensor(tensor).to("cpu", self._dtype(tensor)).contiguous()


def _heads(folder: Path) -> dict[str, str]:
    """The names of the saves that wrote the files in a folder that readers open first, by file."""
    return {name: save_of(folder / name) for name in (WEIGHTS, WEIGHTS_INDEX) if (folder / name).exists()}


def _refuse_foreign(folder: Path) -> None:
    """Raise `CheckpointError` if a folder has weights that no `save_weights` wrote."""
    weights = [each for each in folder.iterdir() if each.name.endswith(_WEIGHTS)] if folder.exists() else []
    foreign = sorted(each.name for each in weights if not _is_own(each))
    if foreign:
        raise CheckpointError(
            f"{folder} has weights already, {foreign[0]} for one, which save_weights did not write: name a new folder, or "
            "remove them"
        )


def _is_own(file: Path) -> bool:
    """Whether a `save_weights` wrote a file, or another job's has removed it meanwhile."""
    if file.name in (WEIGHTS, WEIGHTS_INDEX):
        return bool(save_of(file)) or not file.exists()
    return fnmatch(file.name, _PARTS) and bool(save_in(file.name))


def keys_of(names: str | Sequence[str], known: Mapping[str, object]) -> list[str]:
    """The requested keys, in the model's order. Raises `GraphPPError` for a key that the state dict lacks."""
    if names == "all":
        return list(known)
    wanted = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise GraphPPError(f"names: the model's state dict has no entry {unknown[0]!r}; take its keys, or 'all'")
    return [key for key in known if key in set(wanted)]


def gathered(
    entries: Mapping[str, torch.Tensor], holders: Mapping[int, int], place: RankPlace, rank: int | None
) -> dict[str, torch.Tensor]:
    """Copies of `entries` on `rank` of the pipeline (None: on every rank); {} elsewhere. Arguments as in `Export`."""
    distinct = {id(tensor): tensor for tensor in entries.values()}
    copies = {key: _passed(tensor, holders.get(key), place, rank) for key, tensor in distinct.items()}
    found = {key: copies[id(tensor)] for key, tensor in entries.items()}
    return {key: copy for key, copy in found.items() if copy is not None}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; quantised tensors of libraries know no `to(copy=True)`."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


def _passed(tensor: torch.Tensor, holder: int | None, place: RankPlace, rank: int | None) -> torch.Tensor | None:
    """Send or receive one tensor; returns the copy on a receiving rank, else None."""
    receives = rank is None or rank == place.rank
    if is_over_stages(tensor):
        whole = whole_tensor(tensor)
        return _copied(whole) if receives else None
    if holder is None or place.group is None or (rank is not None and holder == rank):
        return _copied(whole_tensor(tensor)) if receives else None
    if place.rank == holder:
        sent = whole_tensor(tensor).contiguous()
        _bytes_pass(sent, holder, place, rank)
        return _copied(sent) if receives else None
    if not receives:
        return None
    arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
    _bytes_pass(arrived, holder, place, rank)
    return arrived.cpu()


def _bytes_pass(tensor: torch.Tensor, holder: int, place: RankPlace, rank: int | None) -> None:
    flat = tensor.view(-1).view(torch.uint8)  # gloo does not know all dtypes
    if not flat.numel():
        return
    if rank is None:
        dist.broadcast(flat, group=place.group, group_src=holder)
    elif place.rank == holder:
        dist.send(flat, group=place.group, group_dst=rank)
    else:
        dist.recv(flat, group=place.group, group_src=holder)
