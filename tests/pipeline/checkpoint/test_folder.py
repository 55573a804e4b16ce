"""A checkpoint folder is complete or not there; a torn, foreign or malicious one is refused by name and changes nothing."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphpp
from graphpp.errors import CheckpointError
from graphpp.pipeline.checkpoint import folder as folders
from tests.distributed import rank_outcomes, run_ranks


def model(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


X, Y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


def trained(width: int = 6, steps: int = 1, **options: Any) -> tuple[graphpp.Pipeline, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    example = graphpp.Microbatch((X[:2],), target=Y[:2])
    cut = {"split": ["1"], "schedule": "1F1B", "microbatches": 2}
    pipe = graphpp.compile(model(width), F.cross_entropy, example=example, **cut, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    for _ in range(steps):
        pipe.step(X, target=Y)
        optimizer.step()
        optimizer.zero_grad()
    return pipe, optimizer


def values(pipe: graphpp.Pipeline) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in pipe.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pipe, optimizer = trained()
    pipe.checkpoint(optimizer, extra={"epoch": 3}).save(tmp_path / "saved")
    return tmp_path / "saved"


def refusal(path: Path, width: int = 6, **extra: Any) -> str:
    pipe, optimizer = trained(width, steps=2)
    before = values(pipe)
    with pytest.raises(CheckpointError) as caught:
        pipe.checkpoint(optimizer, extra={"epoch": 0, **extra}).load(path)
    assert same(before, values(pipe))
    return str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "none has no checkpoint: it has no file .metadata" in refusal(tmp_path / "none")


def test_a_save_that_was_cut_off(saved: Path) -> None:
    saved.rename(saved.with_name("saved.partial"))
    (saved.with_name("saved.partial") / ".metadata").unlink()
    assert "saved has no complete checkpoint: saved.partial is what a save that was cut off left" in refusal(saved)


def test_a_torn_metadata_file(saved: Path) -> None:
    whole = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(whole[: len(whole) // 2])
    assert ".metadata cannot be read" in refusal(saved)


def test_a_torn_data_file(saved: Path) -> None:
    data = next(saved.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    pipe, optimizer = trained()
    with pytest.raises(CheckpointError, match="rank 0"):
        pipe.checkpoint(optimizer, extra={"epoch": 0}).load(saved)


def test_a_missing_data_file(saved: Path) -> None:
    next(saved.glob("*.distcp")).unlink()
    assert "No such file" in refusal(saved)


def test_the_checkpoint_of_another_model(saved: Path) -> None:
    text = refusal(saved, width=7)
    assert "training.model.0.weight is [6, 4], and here [7, 4]" in text


def test_an_entry_that_the_checkpoint_lacks(saved: Path) -> None:
    assert "lacks 1 entries that this training has: training.extra.loader" in refusal(saved, loader=1)


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_metadata_that_runs_code(saved: Path) -> None:
    marker = saved / "ran"
    (saved / ".metadata").write_bytes(pickle.dumps(Harmful(marker)))
    assert "posix.system, which the metadata of a checkpoint never holds" in refusal(saved)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_that_runs_code(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    marker = tmp_path / "ran"
    pipe, optimizer = trained()
    state = pipe.checkpoint(optimizer, extra={"epoch": 3}).state_dict()
    state["steps"] = Harmful(marker)
    dcp.save({"training": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert "training.steps is no plain value" in refusal(tmp_path / "saved")
    assert not marker.exists()


def test_a_value_that_would_need_a_class_is_not_written(tmp_path: Path) -> None:
    pipe, optimizer = trained()
    checkpoint = pipe.checkpoint(optimizer, extra={"path": Harmful(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match=r"extra\['path'\] of the checkpoint is no plain data"):
        checkpoint.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("moment", ["writing", "exchanging"])
def test_a_process_killed_in_a_save_leaves_the_checkpoint_of_before(moment: str, saved: Path) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    pipe, optimizer = trained(steps=4)
    checkpoint = pipe.checkpoint(optimizer, extra={"epoch": 4})

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    where = (folders, "save") if moment == "writing" else (shutil, "rmtree")
    if moment == "writing":
        with patch.object(*where, killed), pytest.raises(KeyboardInterrupt):
            checkpoint.save(saved)
    else:
        rename = Path.rename

        def once(path: Path, target: Path) -> Path:
            if path.name == "saved.partial":
                raise KeyboardInterrupt
            return rename(path, target)

        with patch.object(Path, "rename", once), pytest.raises(KeyboardInterrupt):
            checkpoint.save(saved)
    found = folders.complete(saved)
    assert {file.name: file.read_bytes() for file in found.iterdir()} == before
    other, its_optimizer = trained(steps=0)
    loaded = other.checkpoint(its_optimizer, extra={"epoch": 0})
    loaded.load(saved)
    assert loaded.extra == {"epoch": 3}


def test_a_save_replaces_the_one_before(saved: Path) -> None:
    pipe, optimizer = trained(steps=4)
    pipe.checkpoint(optimizer, extra={"epoch": 4}).save(saved)
    assert [each.name for each in saved.parent.iterdir()] == ["saved"]
    other, its_optimizer = trained(steps=0)
    loaded = other.checkpoint(its_optimizer, extra={"epoch": 0})
    loaded.load(saved)
    assert loaded.extra == {"epoch": 4}
    assert same(values(pipe), values(other))


def saves_alone(rank: int, folder: Path) -> str:
    pipe, optimizer = trained()
    checkpoint = pipe.checkpoint(optimizer)
    try:
        checkpoint.save(folder / f"of rank {rank}")
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_ranks_that_save_into_two_folders_are_told(tmp_path: Path) -> None:
    for text in run_ranks(saves_alone, 2, tmp_path):
        assert text.startswith("MismatchError")
        assert "of rank 0" in text
        assert "of rank 1" in text


def cannot_write(rank: int, folder: Path) -> str:
    pipe, optimizer = trained()
    checkpoint = pipe.checkpoint(optimizer)
    folder.write_text("a file where a folder should stand")
    try:
        checkpoint.save(folder / "saved")
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    except OSError as error:
        return f"OSError: {error}"
    return "saved"


def test_a_folder_that_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    outcomes = rank_outcomes(cannot_write, 2, tmp_path / "file")
    assert all(outcome.error is None and outcome.value != "saved" for outcome in outcomes)
