"""A checkpoint folder is complete or not there; a torn, foreign or malicious one is refused by name and changes nothing."""

from __future__ import annotations

import base64
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphpp
from graphpp.checkpoint import folder as folders
from graphpp.errors import CheckpointError
from tests.distributed import run_ranks
from tests.saved_graphs import GRAPHS


def model(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


X, Y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


def trained(width: int = 6, steps: int = 1, **options: Any) -> tuple[graphpp.Pipeline, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    example = graphpp.Microbatch((X[:2],), target=Y[:2])
    cut = {"split": ["1"], "schedule": "1F1B", "microbatches": 2}
    pipe = graphpp.compile(model(width), F.cross_entropy, example=example, artifact=GRAPHS, **cut, **options)
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
    (saved / ".metadata").rename(saved / "metadata")
    (saved / ".partial-0123456789abcdef").mkdir()
    assert "saved has no complete checkpoint: .partial-0123456789abcdef is of a save that was cut off" in refusal(saved)


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
def test_a_process_interrupted_in_a_save_leaves_the_checkpoint_of_before(moment: str, saved: Path) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    pipe, optimizer = trained(steps=4)
    checkpoint = pipe.checkpoint(optimizer, extra={"epoch": 4})

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    if moment == "writing":
        with patch.object(folders, "write_entries", killed), pytest.raises(KeyboardInterrupt):
            checkpoint.save(saved)
    else:
        replace = Path.replace

        def once(path: Path, target: Path) -> Path:
            if path.name == ".metadata":
                raise KeyboardInterrupt
            return replace(path, target)

        with patch.object(Path, "replace", once), pytest.raises(KeyboardInterrupt):
            checkpoint.save(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
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
    if rank == 0:
        folder.write_text("a file where a folder should stand")
    try:
        checkpoint.save(folder / "saved")
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_folder_that_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    first, other = run_ranks(cannot_write, 2, tmp_path / "file")
    assert first.startswith("CheckpointError: the checkpoint cannot be written")
    assert other.startswith("MismatchError: other ranks failed")


def test_a_first_start_finds_no_checkpoint(tmp_path: Path) -> None:
    pipe, optimizer = trained()
    checkpoint = pipe.checkpoint(optimizer)
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        assert checkpoint.load(tmp_path / folder, missing_ok=True) is False
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            checkpoint.load(tmp_path / folder)
        checkpoint.save(tmp_path / folder)
        assert checkpoint.load(tmp_path / folder, missing_ok=True) is True


def test_an_async_save_must_be_over_before_the_next_call(tmp_path: Path) -> None:
    pipe, optimizer = trained()
    pending = pipe.checkpoint(optimizer).async_save(tmp_path / "one")
    for call in ("save", "async_save", "load"):
        with pytest.raises(CheckpointError, match="one is not over: call wait"):
            getattr(pipe.checkpoint(optimizer), call)(tmp_path / "two")
    pending.wait()
    pending.wait()
    assert [each.name for each in tmp_path.iterdir()] == ["one"]
    pipe.checkpoint(optimizer).load(tmp_path / "one")


def losses_of(pipe: graphpp.Pipeline, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(X, target=Y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    expected = losses_of(*trained(steps=0))
    pipe, optimizer = trained(steps=0)
    pipe.checkpoint(optimizer).save(tmp_path / "saved")
    assert not optimizer.state
    assert losses_of(pipe, optimizer) == expected
    pipe.checkpoint(optimizer).load(tmp_path / "saved")
    assert not optimizer.state
    optimizer.zero_grad()
    assert losses_of(pipe, optimizer) == expected


def test_a_load_takes_the_state_of_optimizers_whatever_stood_there(tmp_path: Path) -> None:
    pipe, optimizer = trained(steps=2)
    pipe.checkpoint(optimizer).save(tmp_path / "saved")
    expected = losses_of(pipe, optimizer)
    for warm_up in (0, 1):
        other, its_optimizer = trained(steps=0)
        for _ in range(warm_up):
            other.step(X, target=Y)
            its_optimizer.zero_grad(set_to_none=False)
        other.checkpoint(its_optimizer).load(tmp_path / "saved")
        its_optimizer.zero_grad()
        assert losses_of(other, its_optimizer) == expected


def test_the_state_of_a_frozen_parameter_is_kept(tmp_path: Path) -> None:
    pipe, optimizer = trained(steps=2)
    first = next(pipe.parameters())
    first.requires_grad_(False)
    checkpoint = pipe.checkpoint(optimizer)
    checkpoint.save(tmp_path / "saved")
    moments = {name: value.clone() for name, value in optimizer.state[first].items()}
    checkpoint.load(tmp_path / "saved")
    assert all(torch.equal(optimizer.state[first][name], value) for name, value in moments.items())


def test_groups_of_other_values_are_refused(tmp_path: Path) -> None:
    pipe, _ = trained(steps=0)
    weights = [each for each in pipe.parameters() if each.dim() > 1]
    biases = [each for each in pipe.parameters() if each.dim() < 2]
    two = torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0}])
    pipe.checkpoint(two).save(tmp_path / "saved")
    with torch.no_grad():
        weights[0].add_(1.0)
    before = values(pipe)
    with pytest.raises(CheckpointError, match="are in one group of the optimizer, and the checkpoint has other values"):
        pipe.checkpoint(torch.optim.AdamW(pipe.parameters())).load(tmp_path / "saved")
    assert same(before, values(pipe))


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    import numpy as np

    pipe, optimizer = trained()
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    pipe.checkpoint(optimizer, extra={"best": np.float32(0.5)}).save(tmp_path / "saved")
    loaded = pipe.checkpoint(optimizer, extra={"best": 0.0})
    loaded.load(tmp_path / "saved")
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert loaded.extra == {"best": 0.5}


def test_optimizers_that_cannot_be_saved_by_name() -> None:
    pipe, optimizer = trained()
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    cases = {
        "this rank does not train: make the optimizer of pipe.parameters()": [foreign],
        "is in two optimizers": [optimizer, torch.optim.SGD(pipe.parameters(), lr=0.1)],
        "LBFGS keeps one state for all parameters": [torch.optim.LBFGS(pipe.parameters())],
    }
    for said, optimizers in cases.items():
        with pytest.raises(CheckpointError, match=re.escape(said)):
            pipe.checkpoint(*optimizers).state_dict()


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_a_module_with_extra_state_is_refused(tmp_path: Path) -> None:
    example = graphpp.Microbatch((X[:2],), target=Y[:2])
    pipe = graphpp.compile(nn.Sequential(WithExtraState(4, 3)), F.cross_entropy, example=example, split=1, microbatches=2)
    with pytest.raises(CheckpointError, match=r"0\._extra_state of the model's state dict is no parameter"):
        pipe.checkpoint().save(tmp_path / "saved")


def differs(rank: int, folder: Path) -> str:
    pipe, optimizer = trained()
    try:
        pipe.checkpoint(optimizer, extra={"rank": rank}).save(folder)
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_ranks_with_other_extra_values_are_told(tmp_path: Path) -> None:
    for text in run_ranks(differs, 2, tmp_path / "saved"):
        assert text.startswith("MismatchError")
        assert "extra['rank'] of the checkpoint" in text
    assert not (tmp_path / "saved").exists()


def one_rank_lacks_the_folder(rank: int, folder: Path) -> str:
    pipe, optimizer = trained()
    checkpoint = pipe.checkpoint(optimizer)
    checkpoint.save(folder)
    with patch.object(folders, "complete", folders.complete if rank else _gone):
        try:
            checkpoint.load(folder)
        except graphpp.GraphPPError as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


def _gone(path: Path) -> Path:
    raise CheckpointError(f"{path} is gone")


def test_a_rank_that_does_not_see_the_folder_is_told_on_all_ranks(tmp_path: Path) -> None:
    first, other = run_ranks(one_rank_lacks_the_folder, 2, tmp_path / "saved")
    assert first.startswith("CheckpointError")
    assert other.startswith("MismatchError: other ranks failed")


class Named(nn.Module):
    """A module, a buffer and a parameter with the names that entries of a checkpoint have."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(4, 4)
        self.values = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.ones(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state(x) * self.values * self.steps * self.scratch


def named() -> tuple[graphpp.Pipeline, torch.optim.Optimizer, Named]:
    torch.manual_seed(0)
    model, example = Named(), graphpp.Microbatch((X[:2],), target=Y[:2])
    pipe = graphpp.compile(nn.Sequential(model), F.cross_entropy, example=example, split=1, microbatches=2)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.1), model


@pytest.mark.parametrize("key", ["0.state.weight", "0.steps"])
def test_a_state_dict_that_copies_is_refused(key: str, tmp_path: Path) -> None:
    pipe, optimizer, model = named()

    def clone(module: nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        found = key if key in state else key.removeprefix("0.")
        state[found] = state[found].clone()

    model.register_state_dict_post_hook(clone)
    with pytest.raises(CheckpointError, match=rf"the model's state_dict\(\) leaves out or copies {re.escape(key)}"):
        pipe.checkpoint(optimizer).save(tmp_path / "saved")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_load_says_that_the_state_of_an_optimizer_is_missing(saved: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    pipe, optimizer = trained(steps=0)
    cannot_step = patch.object(torch.optim.AdamW, "step", side_effect=RuntimeError)
    with cannot_step, pytest.raises(CheckpointError, match=r"was saved and not loaded.* load with pipe\.checkpoint"):
        load({"training": pipe.checkpoint(optimizer, extra={"epoch": 0})}, checkpoint_id=saved, no_dist=True)
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_text_that_runs_code(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    written, marker = io.BytesIO(), tmp_path / "ran"
    torch.save(Harmful(marker), written)
    pipe, optimizer = trained()
    state = pipe.checkpoint(optimizer, extra={"epoch": 3}).state_dict()
    state["extra"]["epoch"] = base64.b64encode(written.getvalue()).decode()
    save({"training": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert "extra.epoch of the checkpoint is no plain data" in refusal(tmp_path / "saved")
    assert not marker.exists()
