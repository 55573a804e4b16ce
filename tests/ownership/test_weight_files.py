"""Weights of many formats are read by the ranks that need them, and nothing else is read or run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import graphpp
from graphpp.errors import CheckpointError, GraphPPError
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.ownership.models import Angles, Model, X, compiled, init, on_meta, values, whole


def plain() -> dict[str, Tensor]:
    """The state dict of the whole model without aliases, each tensor in memory of its own."""
    state = {key: value.detach().clone() for key, value in whole().state_dict().items()}
    del state["head.weight"]
    return state


def in_shards(folder: Path, state: dict[str, Tensor], suffix: str = ".safetensors", prefix: str = "") -> None:
    """Files with three tensors each, and an index, as Hugging Face writes them."""
    names = list(state)
    where = {}
    for number, start in enumerate(range(0, len(names), 3)):
        file = f"model-{number:05}{suffix}"
        chosen = {prefix + name: state[name] for name in names[start : start + 3]}
        where.update(dict.fromkeys(chosen, file))
        save_file(chosen, folder / file) if suffix == ".safetensors" else torch.save(chosen, folder / file)
    (folder / f"model{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def without_index(folder: Path, state: dict[str, Tensor]) -> None:
    in_shards(folder, state)
    (folder / "model.safetensors.index.json").unlink()


def by_dcp(folder: Path, state: dict[str, Tensor]) -> None:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def by_pipeline(folder: Path, state: dict[str, Tensor]) -> None:
    pipe = compiled(whole())
    pipe.checkpoint(torch.optim.AdamW(pipe.parameters())).save(folder)


FORMATS: dict[str, Callable[[Path, dict[str, Tensor]], object]] = {
    "safetensors": lambda folder, state: save_file(state, folder / "model.safetensors"),
    "safetensors, index": in_shards,
    "safetensors, no index": without_index,
    "bin": partial(in_shards, suffix=".bin"),
    "pt": lambda folder, state: torch.save(state, folder / "all.pt"),
    "DCP": by_dcp,
    "pipe.checkpoint": by_pipeline,
}
LAYOUTS: list[dict[str, Any]] = [
    {"split": 2},
    {"split": ["blocks.1", "blocks.2", "blocks.3"], "schedule": "Interleaved1F1B"},
]
Read = tuple[dict[str, Tensor], float, list[str]]


def read(rank: int, folder: Path, options: dict[str, Any], asked: dict[str, Any]) -> Read:
    torch.set_num_threads(1)
    pipe = compiled(on_meta(), **options)
    opened: list[str] = []
    original = safetensors.safe_open

    def noted(path: str, **kwargs: Any) -> Any:
        opened.append(Path(path).name)
        return original(path, **kwargs)

    with patch.object(safetensors, "safe_open", noted):
        pipe.materialize(weights=folder, **asked)
    return values(pipe), pipe.step(X, target=X).loss.item(), opened


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("safetensors, index", LAYOUTS),
        *((name, LAYOUTS[:1]) for name in ("pt", "DCP", "pipe.checkpoint")),
        *further(*((name, LAYOUTS) for name in FORMATS if name != "safetensors, index")),
    ],
)
def test_every_format_gives_each_rank_its_values(name: str, layouts: Sequence[dict[str, Any]], tmp_path: Path) -> None:
    model = whole()
    expected = {key: value.detach().clone() for key, value in [*model.state_dict().items(), *model.named_buffers()]}
    FORMATS[name](tmp_path, plain())
    losses, found = set(), dict[str, Tensor]()
    for layout in layouts:
        for part, loss, _ in run_ranks(read, 2, tmp_path, layout, {}):
            assert all(torch.equal(value, expected[key]) for key, value in part.items())
            losses.add(loss)
            found |= part
        assert found.keys() == expected.keys()
    assert len(losses) == 1


def test_a_rank_opens_the_files_with_its_tensors(tmp_path: Path) -> None:
    in_shards(tmp_path, plain())
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for part, _, opened in run_ranks(read, 2, tmp_path, {"split": ["blocks.2"]}, {}):
        assert set(opened) == {where[key] for key in part if key in where}
        assert len(opened) == len(set(opened)) < len(set(where.values()))


def test_names_are_mapped(tmp_path: Path) -> None:
    in_shards(tmp_path, plain(), prefix="model.")
    expected = whole().state_dict()
    part, _, _ = read(0, tmp_path, {}, {"names": lambda key: f"model.{key}"})
    assert all(torch.equal(value, part[key]) for key, value in expected.items())


def test_values_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    state = {key: value.bfloat16() if value.is_floating_point() else value for key, value in plain().items()}
    save_file(state, tmp_path / "model.safetensors")
    part, _, _ = read(0, tmp_path / "model.safetensors", {}, {})
    assert all(torch.equal(part[key], value.to(part[key].dtype)) for key, value in state.items())


def test_missing_tensors_can_be_initialised(tmp_path: Path) -> None:
    state = plain()
    del state["blocks.2.up.weight"], state["norm.num_batches_tracked"]
    save_file(state, tmp_path / "model.safetensors")
    asked = {"strict": False, "init": init}
    found = [read(0, tmp_path, options, asked)[0] for options in ({}, {"split": 2, "microbatches": 2})]
    assert torch.equal(found[0]["blocks.2.up.weight"], found[1]["blocks.2.up.weight"])
    assert float(found[0]["blocks.2.up.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert all(torch.equal(found[0][key], value) for key, value in state.items())


def untied(folder: Path, **options: Any) -> nn.Module:
    """A model whose head is no longer the embedding, with the values of a model in which it is."""
    model = on_meta()
    model.head = nn.Linear(16, 11, bias=False, device="meta")
    pipe = compiled(model, **options)
    pipe.materialize(weights=folder, names=lambda key: "embedding.weight" if key == "head.weight" else key)
    return model


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", ["safetensors", *further("pt", "DCP")])
def test_two_keys_may_have_one_name(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path, plain())
    model = untied(tmp_path)
    assert model.head.weight is not model.embedding.weight
    assert torch.equal(model.head.weight, plain()["embedding.weight"])
    assert torch.equal(model.embedding.weight, plain()["embedding.weight"])


def test_files_of_which_nothing_fits_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_shards(tmp_path, plain(), prefix="module.")
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors that this rank needs"):
        compiled(on_meta()).materialize(init, weights=tmp_path, strict=False)
    other = {"strict": False, "names": lambda key: f"module.{key}".replace("up", "upp")}
    compiled(on_meta()).materialize(init, weights=tmp_path, **other)
    assert "lacks 8 tensors that this rank needs: module.blocks.0.upp.weight" in caplog.text
    assert "has 8 tensors that the model lacks: module.blocks.0.up.weight" in caplog.text


def test_a_folder_of_a_trainer_is_read(tmp_path: Path) -> None:
    torch.save(plain(), tmp_path / "pytorch_model.bin")
    torch.save({"a": Bomb()}, tmp_path / "training_args.bin")
    torch.save({"state": torch.ones(2)}, tmp_path / "optimizer.pt")
    part, _, _ = read(0, tmp_path, {}, {})
    assert torch.equal(part["blocks.3.up.weight"], plain()["blocks.3.up.weight"])


class Copying(nn.Linear):
    """Its state dict has a copy of the weight."""

    def __init__(self) -> None:
        super().__init__(16, 32)
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}weight": torch.ones(32, 16)}))


def test_an_entry_that_is_a_copy_is_refused(tmp_path: Path) -> None:
    save_file(plain(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model()
        model.blocks[1].up = Copying()
    pipe = compiled(model)
    for call in (
        lambda: pipe.materialize(init, weights=tmp_path),
        lambda: [pipe.materialize(init), pipe.save_weights(tmp_path / "new")],
        pipe.gather,
    ):
        with pytest.raises(GraphPPError, match=r"state_dict\(\) leaves out or copies blocks\.1\.up\.weight"):
            call()


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


def torn(folder: Path, state: dict[str, Tensor]) -> None:
    in_shards(folder, state)
    file = folder / "model-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_a_file(folder: Path, state: dict[str, Tensor]) -> None:
    in_shards(folder, state)
    (folder / "model-00001.safetensors").unlink()


def outside(folder: Path, state: dict[str, Tensor]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))


def changed(**changes: Tensor | None) -> Callable[[Path, dict[str, Tensor]], None]:
    def save(folder: Path, state: dict[str, Tensor]) -> None:
        kept = {key: value for key, value in {**state, **changes}.items() if value is not None}
        save_file(kept, folder / "model.safetensors")

    return save


def twice(folder: Path, state: dict[str, Tensor]) -> None:
    for name in ("a", "b"):
        save_file({"head.weight": state["embedding.weight"]}, folder / f"{name}.safetensors")


REFUSED: dict[str, tuple[Callable[[Path, dict[str, Tensor]], object], str]] = {
    "empty": (lambda *_: None, r"has no weights: no \.metadata, \*\.index\.json"),
    "torn": (torn, r"model-00002\.safetensors cannot be read"),
    "a pickle that runs code": (lambda folder, _: torch.save({"a": Bomb()}, folder / "all.pt"), r"all\.pt cannot be read"),
    "no zip": (lambda folder, _: (folder / "all.pt").write_bytes(pickle.dumps({"a": 1})), r"all\.pt cannot be read"),
    "an index to elsewhere": (outside, "which is not in the folder of the index"),
    "no index": (lambda folder, _: (folder / "x.index.json").write_text("[1]"), "is no index of weights"),
    "a missing file": (without_a_file, r"model-00001\.safetensors cannot be read"),
    "missing": (changed(**{"blocks.1.up.bias": None}), r"lacks 1 tensors that this rank needs: blocks\.1\.up\.bias.*names="),
    "unknown": (changed(**{"blocks.4.up.bias": torch.ones(2)}), r"has 1 tensors that the model lacks: blocks\.4\.up\.bias"),
    "another shape": (changed(**{"blocks.1.up.bias": torch.ones(3)}), r"blocks\.1\.up\.bias is \[3\], and here \[32\]"),
    "another kind": (changed(**{"norm.num_batches_tracked": torch.ones(())}), r"num_batches_tracked is torch\.float32, and"),
    "larger integers": (changed(**{"norm.num_batches_tracked": torch.tensor(3, dtype=torch.uint64)}), r"is torch\.uint64, and"),
    "complex": (changed(**{"norm.bias": torch.ones(5, dtype=torch.complex64)}), r"norm\.bias is torch\.complex64, and here"),
    "two files": (twice, r"head\.weight is in a\.safetensors and in b\.safetensors"),
}


@pytest.fixture(scope="module")
def empty() -> graphpp.Pipeline:
    """A pipeline of one rank without values, which a refused call leaves as it was."""
    return compiled(on_meta())


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(
    name: str, empty: graphpp.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    save, words = REFUSED[name]
    save(folder, plain())
    with pytest.raises(CheckpointError, match=words):
        empty.materialize(weights=folder)
    assert not Path("exploded").exists()
    assert all(tensor.is_meta for _, tensor in [*empty.named_parameters(), *empty.named_buffers()])


def test_a_buffer_that_no_file_holds_is_named(tmp_path: Path) -> None:
    save_file(plain(), tmp_path / "model.safetensors")
    pipe = compiled(on_meta())
    with pytest.raises(GraphPPError, match=r"angles\.angles of a Angles"):
        pipe.materialize(lambda module: None if isinstance(module, Angles) else init(module), weights=tmp_path)
