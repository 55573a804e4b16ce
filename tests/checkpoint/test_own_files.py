"""A save removes only what it replaces, and all files of a checkpoint that is loaded are of one save."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from graphpp.checkpoint import folder as folders
from graphpp.checkpoint.in_progress import UnfinishedSave
from graphpp.checkpoint.training_state import TrainingState
from graphpp.errors import CheckpointError
from tests.checkpoint.test_folder import trained


def checkpoint(number: int = 0) -> Any:
    """A checkpoint whose parameters, optimizer and extra value are one number."""
    pipe, optimizer = trained()
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(number)
            optimizer.state[parameter]["exp_avg"].fill_(number)
    return pipe.checkpoint(optimizer, extra={"number": number})


def loaded(folder: Path) -> set[float]:
    """The numbers of the checkpoint in a folder."""
    pipe, optimizer = trained(steps=0)
    found = pipe.checkpoint(optimizer, extra={"number": None})
    found.load(folder)
    tensors = [each for p in pipe.parameters() for each in (p, optimizer.state[p]["exp_avg"])]
    return {found.extra["number"]} | {value for each in tensors for value in each.flatten().tolist()}


def contents(folder: Path) -> dict[Path, bytes]:
    return {each.relative_to(folder): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_save_keeps_all_files_of_others(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run / "notes", tmp_path / "run.before", elsewhere):
        folder.mkdir(parents=True)
        (folder / "file").write_text("the user's")
    for name in ("tokenizer.json", "config.json", "__0_0.distcp"):
        (run / name).write_text("the user's")
    for link in (tmp_path / "run.partial", run / ".partial-0123456789abcdef"):
        link.symlink_to(elsewhere)
    before = contents(tmp_path)
    for number in range(3):
        checkpoint(number).save(run / ".." / "run")
    assert before.items() <= contents(tmp_path).items()
    assert loaded(run) == {2}
    assert len(contents(tmp_path)) == len(before) + 2  # .metadata, and one data file


@pytest.mark.parametrize("moment", ["writes", "publishes"])
def test_of_two_jobs_that_save_at_one_time_one_has_the_folder(moment: str, tmp_path: Path) -> None:
    checkpoint(1).save(tmp_path / "run")
    second, write, replace = checkpoint(2), folders.write_entries, Path.replace

    def interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Any, *arguments: Any) -> Any:
            found = call(first, *arguments) if moment == "writes" else None
            if moment == "writes" or first.name == ".metadata":
                with patch.object(folders, "write_entries", write), patch.object(Path, "replace", replace):
                    checkpoint(3).save(tmp_path / "run")
                assert loaded(tmp_path / "run") == {3}
            return found if moment == "writes" else call(first, *arguments)

        return run

    owner, name = (folders, "write_entries") if moment == "writes" else (Path, "replace")
    with patch.object(owner, name, interrupted(getattr(owner, name))):
        second.save(tmp_path / "run")
    assert loaded(tmp_path / "run") == {2}
    assert len(contents(tmp_path)) == 2


def test_a_save_removes_the_files_of_a_killed_one_and_no_others(tmp_path: Path) -> None:
    saves = [UnfinishedSave(tmp_path / "run", digit * 16) for digit in "abc"]
    for each in saves:
        each.begin()
        (each.path / ".metadata").touch()
        (each.path / f"__0_{each.name}_0.distcp").touch()
    killed, alive, with_notes = saves
    (tmp_path / "run" / f"__1_{killed.name}_0.distcp").touch()  # killed while its files were moved
    (with_notes.path / "notes").touch()
    for each in (killed, with_notes):
        assert each._lock is not None
        os.close(each._lock)
    assert not checkpoint().load(tmp_path / "run", missing_ok=True)
    checkpoint(4).save(tmp_path / "run")
    assert loaded(tmp_path / "run") == {4}
    assert not killed.path.exists()
    assert len(contents(alive.path)) == 3
    assert list(contents(with_notes.path)) == [Path("notes")]
    assert len(list((tmp_path / "run").glob("*.distcp"))) == 1


def renamed(folder: Path, name: str) -> None:
    """Another name for the data file in the metadata, with which the file would be found."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    metadata.storage_data = {key: type(each)(name, each.offset, each.length) for key, each in metadata.storage_data.items()}
    shutil.copy(next(folder.glob("*.distcp")), folder / name)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def data_of_another(folder: Path) -> None:
    shutil.copy(next(folder.with_name("two").glob("*.distcp")), next(folder.glob("*.distcp")))


MIXED: dict[str, tuple[Callable[[Path], object], str]] = {
    "data": (data_of_another, r"_0\.distcp is of another save than \.metadata"),
    "metadata": (lambda one: shutil.copy(one.with_name("two") / ".metadata", one), r"_0\.distcp is missing"),
    "upward": (lambda one: renamed(one, "../data"), r"names the file \.\./data, and the files of a checkpoint are in its own"),
    "absolute": (lambda one: renamed(one, str(one / "data")), "names the file /"),
    "a folder below": (lambda one: [(one / "a").mkdir(), renamed(one, "a/b")], "names the file a/b"),
}


@pytest.mark.parametrize("name", MIXED)
def test_files_of_two_saves_are_refused(name: str, tmp_path: Path) -> None:
    for number, folder in enumerate(("one", "two")):
        checkpoint(number).save(tmp_path / folder)
    mix, words = MIXED[name]
    mix(tmp_path / "one")
    with pytest.raises(CheckpointError, match=words):
        loaded(tmp_path / "one")


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path) -> None:
    checkpoint(1).save(tmp_path)
    check = TrainingState.check_plain

    def saving(*arguments: Any) -> None:
        check(*arguments)
        checkpoint(2).save(tmp_path)

    words = "is missing: it was removed, or another save replaced this one, so load again"
    with patch.object(TrainingState, "check_plain", saving), pytest.raises(CheckpointError, match=words):
        loaded(tmp_path)
    assert loaded(tmp_path) == {2}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_no_save_wrote_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("notes")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / ".metadata").write_text("notes")
    save({"app": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "of torch", no_dist=True)
    before = contents(tmp_path)
    for name, words in {"file": "is no checkpoint", "damaged": "cannot be read", "of torch": "did not write"}.items():
        with pytest.raises(CheckpointError, match=f"{words}.* save would replace it: name a (new )?folder"):
            checkpoint().save(tmp_path / name)
    assert contents(tmp_path) == before
    assert [each.name for each in (tmp_path / "of torch").iterdir() if "partial" in each.name] == []
