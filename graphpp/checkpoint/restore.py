"""Restore a training from the files of a checkpoint.

Contract
--------
- The values that are no tensors are read and checked first, and all names and shapes before a tensor is read: a checkpoint that
  does not fit changes nothing.
- Functions are called by all ranks of a pipeline. Errors are `CheckpointError`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from graphpp.checkpoint.safe_reading import SafePlanner, SafeReader
from graphpp.checkpoint.training_state import TrainingState
from graphpp.errors import CheckpointError, GraphPPError

ENTRY = "training"  # the name of the training among the entries of a folder


def restore_from(
    state: TrainingState,
    words: str,
    find: Callable[[], Path | None],
    provide: Callable[[Path, dict[str, Any]], None] | None = None,
) -> bool:
    """Restore the training from the folder that `find` finds; False where it finds none, on all ranks alike.

    `words` name the checkpoint in errors, as "the checkpoint in run/latest" does. `provide` is called, on all ranks, with the
    folder and the entries to read next.
    """
    plain, tensors = dict[str, Any](), dict[str, Any]()
    found: list[Path] = []

    def begin() -> None:
        found.extend(filter(None, [find()]))
        plain.update(state.plain_targets())

    def alike() -> dict[str, list[str]]:
        return {words: [f"{len(found)} found"]}

    def prepare() -> None:
        state.check_plain(plain)
        tensors.update(state.tensor_targets(_stored_tensors(found[0])))

    def fill(entries: dict[str, Any]) -> None:
        if provide is not None:
            provide(found[0], {ENTRY: entries})
        _fill(state, entries, found[0])

    def restore() -> None:
        optimizer = {**plain["optimizer"], **tensors["optimizer"]}
        state.restore({**plain, **tensors, "optimizer": optimizer})

    state.calls.all_do(f"load {words}", begin, alike)
    if not found:
        return False
    fill(plain)
    state.calls.all_do(f"the plain values of {words} fit", prepare)
    fill(tensors)
    state.calls.all_do(f"{words} is loaded", restore)
    return True


def _fill(state: TrainingState, entries: dict[str, Any], folder: Path) -> None:
    """Read entries, in place."""
    group = state.calls.file_group
    with state.calls.watched(), told(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        reader, planner = SafeReader(folder), SafePlanner(folder)
        load({ENTRY: entries}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


def _stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by entry, without their values."""
    stored, prefix = SafeReader(folder).read_metadata().state_dict_metadata, f"{ENTRY}."
    return {
        name.removeprefix(prefix): torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, found in stored.items()
        if name.startswith(prefix) and isinstance(found, TensorStorageMetadata)
    }


@contextmanager
def told() -> Iterator[None]:
    """Raise the error of the first rank that failed in torch's distributed checkpoint, instead of torch's table of errors."""
    try:
        yield
    except CheckpointException as fault:
        rank, (first, _) = sorted(fault.failures.items())[0]
        text = str(first) if isinstance(first, GraphPPError) else f"{type(first).__name__}: {first}"
        raise CheckpointError(f"rank {rank}: {text}") from first


def without_os_errors(work: Callable[[], object]) -> Callable[[], None]:
    """`work` with `CheckpointError` in place of the errors of the file system."""

    def run() -> None:
        try:
            work()
        except OSError as fault:
            raise CheckpointError(f"the checkpoint cannot be written: {fault}") from fault

    return run
