"""Read named tensors from a checkpoint: safetensors, files of `torch.save`, or torch's distributed checkpoint.

- `open_weights(path)` accepts a folder of torch's distributed checkpoint (`.metadata`), a folder of files with or without an
  index (`*.index.json`, as Hugging Face writes it), or a single `.safetensors`, `.pt`, `.pth` or `.bin` file.
- `Weights.copy(targets)` reads only the targets' bytes and converts to their dtypes. The extra peak memory is one tensor.
- No class is loaded and no code is run that a file names. Every fault of a file is a `CheckpointError` with its path.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from graphpp.checkpoint.in_progress import METADATA, published
from graphpp.checkpoint.restore import ENTRY, told
from graphpp.checkpoint.safe_reading import SafePlanner, SafeReader, torchs_reason
from graphpp.errors import CheckpointError

_SAVED = (".pt", ".pth", ".bin")  # files of torch.save
_INDEX = ".index.json"
SAVE = "graphpp_save"  # key of the name of the save, in the metadata of an index and of safetensors


def open_weights(path: Path) -> Weights:
    """The tensors of the checkpoint at `path`. Raises `CheckpointError` if there is no checkpoint, or more than one."""
    if path.is_file():
        return _Files({name: path for name in _names(path)}, save_of(path))
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if (path / METADATA).is_file():
        return _Distributed(path)
    files = _in_folder(path)
    if len(files) == 1 and files[0].name.endswith(_INDEX):
        return _Files(_indexed(files[0]), save_of(files[0]))
    if not files:
        raise CheckpointError(f"{path} has no weights: no .metadata, *.index.json, *.safetensors, *.pt, *.pth or *.bin")
    where: dict[str, Path] = {}
    for file in files:
        for name in _names(file):
            if name in where:
                raise CheckpointError(f"{path}: {name} is in {where[name].name} and in {file.name}: give the path of one file")
            where[name] = file
    return _Files(where, save_of(files[0]) if len(files) == 1 else "")


class _Files:
    """Tensors in safetensors files and files of `torch.save`, each in one file."""

    def __init__(self, where: Mapping[str, Path], save: str = "") -> None:
        """`save`: the name of the save that wrote all files; empty if they name none."""
        self._where, self.save = where, save

    def stored(self) -> Mapping[str, torch.Tensor | None]:
        """The names of all tensors, with meta tensors like them if no file must be opened for that (else None)."""
        return dict.fromkeys(self._where)

    def copy(self, targets: Mapping[str, torch.Tensor]) -> None:
        by_file: dict[Path, list[str]] = {}
        for name in targets:
            by_file.setdefault(self._where[name], []).append(name)
        for file, names in by_file.items():
            with _tensors(file, self.save) as read, torch.no_grad():
                for name in names:
                    _copy(file, name, read, targets[name])


class _Distributed:
    """Tensors in torch's distributed checkpoint; in a folder of `pipe.checkpoint`, the model's tensors."""

    def __init__(self, path: Path) -> None:
        self._path, self._reader = path, SafeReader(path)
        self.save = self._reader.save
        self._stored = {
            name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, found in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        model = f"{ENTRY}.model."
        self._prefix = model if any(name.startswith(model) for name in self._stored) else ""

    def stored(self) -> Mapping[str, torch.Tensor | None]:
        cut = len(self._prefix)
        return {name[cut:]: value for name, value in self._stored.items() if name.startswith(self._prefix)}

    def copy(self, targets: Mapping[str, torch.Tensor]) -> None:
        entries: dict[str, Any] = {self._prefix + name: target.detach() for name, target in targets.items()}
        with told(), warnings.catch_warnings():  # torch warns without a process group
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
            load(entries, storage_reader=self._reader, planner=SafePlanner(self._path), no_dist=True)


Weights = _Files | _Distributed


def _in_folder(path: Path) -> list[Path]:
    """The index of a folder, or its weight files: safetensors first, then Hugging Face's names."""
    for index, pattern in ((f"*.safetensors{_INDEX}", "*.safetensors"), (f"*{_INDEX}", "pytorch_model.bin")):
        indexes = sorted(path.glob(index))
        if len(indexes) > 1:
            raise CheckpointError(f"{path} has two indexes, {indexes[0].name} and {indexes[1].name}: keep one of them")
        found = indexes or sorted(published(path, pattern))
        if found:
            return found
    return sorted(each for each in path.iterdir() if each.suffix in _SAVED)


def _indexed(index: Path) -> dict[str, Path]:
    try:
        listed = json.loads(index.read_text())["weight_map"]
        files = {str(name): index.parent / file for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise CheckpointError(f"{index} is no index of weights: {type(fault).__name__}: {fault}") from fault
    outside = [file for file in files.values() if file.parent != index.parent or file.name == ".."]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]}, which is not in the folder of the index")
    return files


def save_of(file: Path) -> str:
    """The name of the save that wrote an index or a safetensors file; empty if it names none."""
    try:
        if file.name.endswith(_INDEX):
            return str(json.loads(file.read_text())["metadata"][SAVE])
        with safetensors.safe_open(os.fspath(file), framework="pt") as opened:
            return str((opened.metadata() or {}).get(SAVE, ""))
    except Exception:  # a file of others raises nearly anything
        return ""


def _names(file: Path) -> list[str]:
    with _tensors(file) as read:
        return list(read)


@contextmanager
def _tensors(file: Path, save: str = "") -> Iterator[Mapping[str, Callable[[], torch.Tensor]]]:
    """The tensors of a file by name, each read lazily from the mapped file. `save`: that of all files, if known."""
    try:
        if file.suffix == ".safetensors":
            with safetensors.safe_open(os.fspath(file), framework="pt") as opened:
                if save and (opened.metadata() or {}).get(SAVE, save) != save:
                    raise CheckpointError(f"{file} is of another save than the first file that was read")
                yield {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118 - it has no __iter__
        elif file.suffix in _SAVED:
            saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            named = list(_flat(saved, ""))
            if len(dict(named)) < len(named):
                raise CheckpointError(f"{file} has two tensors of one name, once its nested keys are joined with dots")
            yield {name: tensor.detach for name, tensor in named}
        else:
            raise CheckpointError(f"{file}: weights are read from .safetensors, {', '.join(_SAVED)}")
    except CheckpointError:
        raise
    except Exception as fault:  # a truncated file raises nearly anything
        raise CheckpointError(f"{file} cannot be read: {type(fault).__name__}: {torchs_reason(fault)}") from fault


def _flat(saved: object, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested mappings, named by their keys joined with dots."""
    if isinstance(saved, Mapping):
        for key, value in saved.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(saved, torch.Tensor):
        yield prefix, saved


def _copy(file: Path, name: str, read: Mapping[str, Callable[[], torch.Tensor]], target: torch.Tensor) -> None:
    if name not in read:
        raise CheckpointError(f"{file} lacks {name}, which the index has in this file")
    value = read[name]()
    check_fits(file, name, value, target)
    target.copy_(value)


def check_fits(path: Path, name: str, value: torch.Tensor, target: torch.Tensor) -> None:
    """Raise `CheckpointError` if a stored tensor's shape differs, or `target` cannot represent its dtype (float precision
    aside).
    """
    if value.shape != target.shape:
        raise CheckpointError(f"{path}: {name} is {list(value.shape)}, and here {list(target.shape)}")
    if not _has_numbers_of(target.dtype, value.dtype):
        raise CheckpointError(f"{path}: {name} is {value.dtype}, and here {target.dtype}")


def _has_numbers_of(target: torch.dtype, stored: torch.dtype) -> bool:
    if target == stored or (target.is_floating_point and stored.is_floating_point) or (target.is_complex and stored.is_complex):
        return True
    integers = not any(dtype.is_floating_point or dtype.is_complex for dtype in (target, stored))
    if not integers or target is torch.bool:
        return False
    limits = torch.iinfo(target)
    return stored is torch.bool or (limits.min <= torch.iinfo(stored).min and torch.iinfo(stored).max <= limits.max)
