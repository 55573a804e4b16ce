"""Read a folder of torch's distributed checkpoint without running code that the folder names.

- `SafeReader` unpickles `.metadata` with only the classes that torch writes there, once, and reads only data files of the same
  save in the same folder. `SafePlanner` reads other values than tensors with `torch.load(weights_only=True)`, and checks that
  entries exist with the right shapes. Both raise `CheckpointError` with the file or entry.
- Values without an entry of their own are text. `as_text` takes dicts, lists, tuples, numbers, strings and tensors, and
  converts NumPy numbers to Python's; equal values give equal texts. Other classes raise `CheckpointError`. The state of an
  object has the name of its class before it (`class_in`), except in checkpoints of earlier versions.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from graphpp.checkpoint.in_progress import METADATA, save_in
from graphpp.errors import CheckpointError

ANYTHING = ("entries", "dtypes")  # differences between a checkpoint and the entries to be read
_METADATA_CLASSES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_ACCEPTED = {
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath")),
    *(("collections", "OrderedDict"), ("torch", "Size"), ("torch.serialization", "_get_layout")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
}


class _Unpickler(pickle.Unpickler):
    """Loads only the classes that torch writes into the metadata of a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ACCEPTED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which the metadata of a checkpoint never holds")


class SafeReader(FileSystemReader):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._folder = Path(path)
        self._read: dict[int | None, Metadata] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the folder. Raises `CheckpointError` if it cannot be read or names other classes or folders."""
        rank = kwargs.get("rank")
        if rank not in self._read:
            self._read[rank] = self._metadata_in(self._folder / (METADATA if rank is None else f"__{rank}{METADATA}"))
        return self._read[rank]

    @property
    def save(self) -> str:
        """The name of the save; empty if the save gave its files no name."""
        return save_of_files(self.read_metadata())

    def _metadata_in(self, path: Path) -> Metadata:
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            names = sorted({str(each.relative_path) for each in (getattr(metadata, "storage_data", None) or {}).values()})
        except Exception as fault:  # a truncated pickle raises nearly anything
            raise CheckpointError(f"{path} cannot be read: {fault}. The checkpoint is torn, or nobody's of torch") from fault
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds a {type(metadata).__name__} where the metadata of a checkpoint should stand")
        for name in names:
            if PurePath(name).name != name or "\\" in name or name in ("", ".."):
                raise CheckpointError(f"{path} names the file {name}, and the files of a checkpoint are in its own folder")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except FileNotFoundError as fault:
            raise CheckpointError(
                f"{fault.filename} is missing: it was removed, or another save replaced this one, so load again"
            ) from fault

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """The bytes of an entry. Raises `CheckpointError` if they are damaged, or if another save wrote the file."""
        file.seek(sinfo.offset)
        damage = _damage(file.read(sinfo.length), sinfo.length)
        if damage is not None:
            raise CheckpointError(f"{self._folder / sinfo.relative_path} is damaged: {damage}")
        if self.save:
            file.seek(-len(self.save), os.SEEK_END)
            if file.read() != self.save.encode():
                raise CheckpointError(f"{self._folder / sinfo.relative_path} is of another save than {METADATA}")
        found: IO[bytes] = super()._slice_file(file, sinfo)
        return found


def save_of_files(metadata: Metadata) -> str:
    """The name that a save gave its files (`NamedWriter`); empty for other writers."""
    name = str(getattr(metadata.storage_meta, "save_id", None))
    return name if name == save_in(name) else ""


def _damage(content: bytes, length: int) -> str | None:
    """The damage of a `torch.save` file in words; torch writes checksums but does not check them."""
    if len(content) < length:
        return f"it ends {length - len(content)} bytes too early"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            record = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError) as fault:
        return str(fault)
    return None if record is None else f"the checksum of its record {record} differs"


class SafePlanner(DefaultLoadPlanner):
    """Checks names, shapes and dtypes before anything is read, and reads plain values without running code."""

    def __init__(
        self, folder: Path, allowed: Collection[str] = ANYTHING, whole: str | None = None, known: Collection[str] = ()
    ) -> None:
        """`allowed`: of the words `ANYTHING`. `whole`: all entries of this prefix must be `known`, or be read on some rank, but
        for tensors that are no parameters and buffers.
        """
        super().__init__()
        self._folder, self._allowed, self._whole, self._known = folder, allowed, whole, known

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        stored = metadata.state_dict_metadata
        missing = [name for name in self.state_dict if name not in stored]
        if missing:
            raise CheckpointError(
                f"{self._folder} lacks {len(missing)} entries that this training has: {', '.join(missing[:3])}. "
                f"It has {len(stored)} others, such as {', '.join(list(stored)[:2])}"
            )
        for name, value in self.state_dict.items():
            found = stored[name]
            if isinstance(value, torch.Tensor) != isinstance(found, TensorStorageMetadata):
                raise CheckpointError(f"{self._folder}: {name} is a tensor on one side alone")
            if isinstance(found, TensorStorageMetadata) and value.shape != found.size:
                raise CheckpointError(f"{self._folder}: {name} is {list(found.size)}, and here {list(value.shape)}")
            dtype = found.properties.dtype if isinstance(found, TensorStorageMetadata) else None
            if dtype is not None and value.dtype != dtype and "dtypes" not in self._allowed:
                raise CheckpointError(
                    f"{self._folder}: {name} is {dtype}, and here {value.dtype}: train in the dtypes of the checkpoint, or "
                    'convert its values with allow="dtypes"'
                )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Called on one rank, with the plans of all."""
        if self._whole is not None and "entries" not in self._allowed and self.metadata is not None:
            known = {*self._known, *(item.storage_index.fqn for plan in global_plan for item in plan.items)}
            stored, model = self.metadata.state_dict_metadata.items(), f"{self._whole}.model."
            names = (name for name, found in stored if name.startswith(model) or not isinstance(found, TensorStorageMetadata))
            unknown = sorted(name for name in names if name.startswith(f"{self._whole}.") and name not in known)
            if unknown:
                raise CheckpointError(
                    f"{self._folder} has {len(unknown)} entries that this training lacks: {', '.join(unknown[:3])}. Load it "
                    'into the training that saved it, or leave these entries out with allow="entries"'
                )
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            plain = torch.load(value, weights_only=True)
        except Exception as fault:
            name = read_item.storage_index.fqn
            raise CheckpointError(f"{self._folder}: {name} is no plain value, or is torn; nothing was run") from fault
        written = io.BytesIO()
        torch.save(plain, written)
        written.seek(0)
        super().load_bytes(read_item, written)


def as_text(name: str, value: Any) -> str:
    """A value as text; `name` is for the error."""
    written = io.BytesIO()
    try:
        torch.save(_plain(value), written)
    except Exception as fault:  # a class's own pickling may raise anything
        raise _refusal(name, fault) from fault
    text = base64.b64encode(written.getvalue()).decode()
    from_text(name, text)
    return text


def state_text(name: str, owner: object, state: Any) -> str:
    """The state of an object as text, after the name of the object's class."""
    return f"{type(owner).__name__} {as_text(name, state)}"


def class_in(text: str) -> str:
    """The class of the object whose state a text has; empty if the text names none."""
    return text.rpartition(" ")[0]


def is_state_of(owner: object, text: str) -> bool:
    """Whether a text has the state of an object of this class, or names no class."""
    return class_in(text) in ("", type(owner).__name__)


def from_text(name: str, text: str) -> Any:
    """The value that `as_text` or `state_text` wrote; `name` is for the error."""
    try:
        return torch.load(io.BytesIO(base64.b64decode(text.rpartition(" ")[2])), weights_only=True)
    except Exception as fault:
        raise _refusal(name, fault) from fault


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    is_numpy_number = type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0
    return value.item() if is_numpy_number else value


def _refusal(name: str, fault: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name} of the checkpoint is no plain data, and reading it would run code. Give dicts, lists, tuples, numbers, "
        f"strings and tensors, or an object whose state_dict() has these alone ({type(fault).__name__}: {torchs_reason(fault)})"
    )


def torchs_reason(fault: Exception) -> str:
    """The line of torch's message that names the class."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else "")[:300]
