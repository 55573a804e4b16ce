"""The whole model is written as safetensors by the ranks that hold it, and read again by Hugging Face and by graphpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from graphpp.errors import CheckpointError, GraphPPError
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
    assert files == [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
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


def test_a_folder_with_weights_is_never_changed(tmp_path: Path) -> None:
    saves(0, tmp_path, {}, {})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for text in run_ranks(refused, 2, tmp_path, {}):
        assert "has weights already, model.safetensors for one" in text
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


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
