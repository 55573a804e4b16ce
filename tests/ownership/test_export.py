"""The whole model is written as safetensors by the ranks that hold it, and read again by Hugging Face and by graphpp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from graphpp.checkpoint.in_progress import UnfinishedSave
from graphpp.errors import CheckpointError, GraphPPError
from graphpp.ownership.weight_files import open_weights
from tests.distributed import run_ranks
from tests.exhaustive import cases, further
from tests.ownership.models import Model, X, compiled, whole

WRITTEN = [key for key in Model().state_dict() if key != "head.weight"]


def read(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def saves(rank: int, folder: Path, layout: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    torch.set_num_threads(1)
    pipe = compiled(whole(), **layout)
    pipe.save_weights(folder, **asked)
    return list(pipe.state_dict())


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("ranks", "bytes_"), [(1, 2**30), (2, 5000), (4, 1), *further((1, 1), (1, 5000), (2, 1), (2, 2**30), (4, 5000), (4, 2**30))]
)
def test_all_tensors_are_written_once(ranks: int, bytes_: int, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    layout = {"split": ranks}
    asked = {"max_file_bytes": bytes_}
    run_ranks(saves, ranks, folder, layout, asked) if ranks > 1 else saves(0, folder, layout, asked)
    expected, found = whole().state_dict(), read(folder)
    assert sorted(found) == sorted(WRITTEN)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert [each.name for each in tmp_path.iterdir()] == ["weights"] and all(each.is_file() for each in folder.iterdir())
    if ranks == 1 and bytes_ == 2**30:
        assert files == ["model.safetensors"] == [each.name for each in folder.iterdir()]
        return
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save = index["metadata"]["graphpp_save"]
    assert files == [f"model-{save}-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
    assert index["metadata"]["total_size"] == sum(expected[key].nbytes for key in WRITTEN)
    assert index["weight_map"] == {name: file for file in files for name in load_file(folder / file)}
    assert all(len(list(load_file(folder / file))) == 1 for file in files) == (bytes_ == 1)


def exchanged(rank: int, folder: Path) -> float:
    first = compiled(whole(), split=2)
    torch.manual_seed(1)
    first.step(X, target=X)
    first.save_weights(folder, names=lambda key: f"m.{key}")
    with torch.device("meta"):
        model = Model()
    second = compiled(model, split=["blocks.3"], schedule="GPipe")
    second.materialize(weights=folder, names=lambda key: f"m.{key}")
    one, other = first.eval(X, target=X).loss, second.eval(X, target=X).loss
    assert one is not None and other is not None and torch.equal(one, other)
    return float(one)


def test_written_weights_go_into_another_layout(tmp_path: Path) -> None:
    one, other = run_ranks(exchanged, 2, tmp_path / "weights")
    assert one == other


def test_numbers_are_converted(tmp_path: Path) -> None:
    saves(0, tmp_path / "half", {}, {"dtype": torch.bfloat16})
    found, expected = read(tmp_path / "half"), whole().state_dict()
    assert found["blocks.0.up.weight"].dtype is torch.bfloat16
    assert torch.equal(found["blocks.0.up.weight"], expected["blocks.0.up.weight"].bfloat16())
    assert found["norm.num_batches_tracked"].dtype is torch.int64


def refused(rank: int, folder: Path, how: dict[str, Any]) -> str:
    pipe = compiled(whole(), split=2)
    with pytest.raises(GraphPPError) as error:
        pipe.save_weights(folder, **how)
    return str(error.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one name": ({"names": len}, "must return a string"),
    "equal names": ({"names": lambda key: "same"}, "would both be written as same"),
    "integers": ({"dtype": torch.int8}, "dtype: take a floating-point"),
    "no bytes": ({"max_file_bytes": 0}, "max_file_bytes"),
}


@pytest.mark.parametrize("name", cases(REFUSED, "one name", "integers"))
def test_wrong_arguments_are_refused(name: str, tmp_path: Path) -> None:
    how, words = REFUSED[name]
    pipe = compiled(whole())
    with pytest.raises(GraphPPError, match=words):
        pipe.save_weights(tmp_path / "weights", **how)
    assert not list(tmp_path.iterdir())


def test_weights_of_others_are_never_changed(tmp_path: Path) -> None:
    save_file(dict(read_state()), tmp_path / "model.safetensors")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for text in run_ranks(refused, 2, tmp_path, {}):
        assert "has weights already, model.safetensors for one, which save_weights did not write" in text
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def read_state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in whole().state_dict().items() if key in WRITTEN}


def test_weights_are_replaced_and_all_other_files_stay(tmp_path: Path) -> None:
    users = ("config.json", "tokenizer.json", ".unfinished")
    for name in users:
        (tmp_path / name).write_text("the user's")
    pipe = compiled(whole())
    for number, bytes_ in enumerate((2**30, 2**30, 5000, 1, 5000, 2**30)):
        with torch.no_grad():
            next(pipe.parameters()).fill_(number)
        pipe.save_weights(tmp_path, max_file_bytes=bytes_)
        copied = {key: torch.empty_like(value) for key, value in read_state().items()}
        open_weights(tmp_path).copy(copied)
        assert all(torch.equal(value, pipe.state_dict()[key]) for key, value in copied.items())
        assert sorted(read(tmp_path)) == sorted(WRITTEN)  # in the files of one save
    assert {each.name for each in tmp_path.iterdir()} == {*users, "model.safetensors"}


@pytest.mark.parametrize(("kept", "ends"), [(2**30, "killed"), (5000, "killed"), (5000, "interrupted")])
def test_an_export_that_ends_early_leaves_the_weights_of_before(kept: int, ends: str, tmp_path: Path) -> None:
    pipe = compiled(whole())
    pipe.save_weights(tmp_path, max_file_bytes=kept)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "model.safetensors.index.json":
            raise KeyboardInterrupt
        return replace(path, target)

    removes = UnfinishedSave.__exit__ if ends == "interrupted" else lambda *_: False  # a killed process removes nothing
    patched = patch.object(UnfinishedSave, "__exit__", removes)
    with patch.object(Path, "replace", interrupted), patched, pytest.raises(KeyboardInterrupt):
        pipe.save_weights(tmp_path, max_file_bytes=1)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert before.items() < after.items() if ends == "killed" else before == after
    copied = {key: torch.empty_like(value) for key, value in read_state().items()}
    open_weights(tmp_path).copy(copied)
    assert all(torch.equal(value, pipe.state_dict()[key]) for key, value in copied.items())


def test_weights_of_two_saves_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        saves(0, tmp_path / folder, {}, {"max_file_bytes": 5000})
    one, two = (sorted((tmp_path / folder).glob("*-00002-of-*"))[0] for folder in ("one", "two"))
    shutil.copy(two, one)
    with pytest.raises(CheckpointError, match=r"00002-of-\d+\.safetensors is of another save than the first file"):
        open_weights(tmp_path / "one").copy({key: torch.empty_like(value) for key, value in read_state().items()})


class WithState(nn.Linear):
    """Has an entry in the state dict that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_an_entry_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    model = whole()
    model.blocks[1].up = WithState(16, 32)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.up\._extra_state of the model's state dict is no tensor"):
        compiled(model).save_weights(tmp_path / "weights")
