"""Restore a training from the files of a checkpoint.

Values other than tensors, and all names, shapes and dtypes, are checked before a tensor is read: a checkpoint that does not fit
changes nothing. All ranks call these functions and read one save. Errors are `CheckpointError`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from graphpp.arguments import Accepted
from graphpp.checkpoint.safe_reading import ANYTHING, SafePlanner, SafeReader
from graphpp.checkpoint.training_state import TrainingState
from graphpp.errors import CheckpointError, GraphPPError

ENTRY = "training"  # prefix of the training's entries in a folder
_WORDS = (*ANYTHING, "classes", "settings")
ALLOWED = Accepted(
    f"words of {', '.join(map(repr, _WORDS))}, one or several",
    lambda value: isinstance(value, Collection)
    and all(word in _WORDS for word in ([value] if isinstance(value, str) else value)),
)


def restore_from(
    state: TrainingState,
    words: str,
    find: Callable[[], Path | None],
    provide: Callable[[Path, dict[str, Any]], None] | None = None,
    allow: str | Collection[str] = (),
) -> bool:
    """Restore the training from the folder that `find` returns; returns False if it returns None (on all ranks alike).

    `words` name the checkpoint in errors. `provide` is called on all ranks with the folder and the entries to read next.
    `allow`: words for the differences between checkpoint and training that are accepted (`Checkpoint.load`).
    """
    allowed, calls = {allow} if isinstance(allow, str) else {*allow}, state.calls
    with calls.all_replicas(f"load {words}"), calls.all_ranks(f"load {words}") as alike:
        folder, plain = find(), state.plain_targets()
        reader = None if folder is None else SafeReader(folder)
        found = "none found" if reader is None else f"found {reader.save}"
        alike.update({words: [found], "allow": sorted(allowed)})
    with calls.all_replicas(f"load {words}: {found}"):
        pass
    if folder is None or reader is None:
        return False
    known = [f"{ENTRY}.model.{key}" for key in state.model_keys()]
    _fill(state, plain, reader, SafePlanner(folder, allowed, ENTRY, known), provide)
    with calls.all_ranks(f"the plain values of {words} fit"):
        state.check_plain(plain, allowed)
        tensors = state.tensor_targets(_stored_tensors(reader), plain)
    _fill(state, tensors, reader, SafePlanner(folder, allowed), provide)
    with calls.all_ranks(f"{words} is loaded"):
        optimizer = {**plain["optimizer"], **tensors["optimizer"]}
        state.restore({**plain, **tensors, "optimizer": optimizer})
    return True
def _fill(
    state: TrainingState,
    entries: dict[str, Any],
    reader: SafeReader,
    planner: SafePlanner,
    provide: Callable[[Path, dict[str, Any]], None] | None,
) -> None:
    if provide is not None:
        provide(Path(reader.path), {ENTRY: entries})
    group = state.calls.file_group
    with state.calls.watched(), told(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        load({ENTRY: entries}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


def _stored_tensors(reader: SafeReader) -> dict[str, torch.Tensor]:
    """Meta tensors for the tensors of a checkpoint, by entry."""
    stored, prefix = reader.read_metadata().state_dict_metadata, f"{ENTRY}."
    return {
        name.removeprefix(prefix): torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, found in stored.items()
        if name.startswith(prefix) and isinstance(found, TensorStorageMetadata)
    }


@contextmanager
def told() -> Iterator[None]:
    """Raise the error of the first rank that failed in torch's distributed checkpoint, not torch's table of errors."""
    try:
        yield
    except CheckpointException as fault:
        rank, (first, _) = sorted(fault.failures.items())[0]
        text = str(first) if isinstance(first, GraphPPError) else f"{type(first).__name__}: {first}"
        raise CheckpointError(f"rank {rank}: {text}") from first


@contextmanager
def without_os_errors() -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise CheckpointError(f"the checkpoint cannot be written: {fault}") from fault
