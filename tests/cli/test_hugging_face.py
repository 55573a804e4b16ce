"""Causal language models of transformers, built from a `config.json` alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphpp.cli.models import load_model
from graphpp.errors import GraphPPError
from tests.cli.running import document, write

SMALL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


def folder(path: Path, **changes: Any) -> str:
    write(path / "config.json", json.dumps(SMALL | changes))
    return str(path)


def test_the_model_and_its_tokens(tmp_path: Path) -> None:
    found = load_model(folder(tmp_path), rows=3, length=16)
    assert isinstance(found.model, transformers.LlamaForCausalLM)
    assert found.model.training
    assert found.loss is None
    tokens = found.example.kwargs["input_ids"]
    assert tokens.shape == (3, 16)
    assert torch.equal(tokens, found.example.kwargs["labels"])
    assert 0 <= tokens.min() < tokens.max() < 64
    again = load_model(str(tmp_path), rows=3, length=16)
    pairs = zip(found.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_positions_without_a_limit(tmp_path: Path) -> None:
    """XLNet's configuration says -1."""
    sizes = {"model_type": "xlnet", "vocab_size": 64, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64}
    name = str(write(tmp_path / "config.json", json.dumps(sizes)).parent)
    for length, expected in ((None, 64), (5000, 5000)):
        assert load_model(name, length=length, meta=True).example.kwargs["input_ids"].shape == (2, expected)


def test_a_function_may_return_such_a_model_alone(tmp_path: Path) -> None:
    code = f"""
        import transformers
        def build(): return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{SMALL}))
        def headless(): return transformers.LlamaModel(transformers.LlamaConfig(**{SMALL}))
    """
    file = write(tmp_path / "llama_to_load.py", code)
    assert load_model(f"{file}:build", rows=1, length=8).example.kwargs["input_ids"].shape == (1, 8)
    with pytest.raises(GraphPPError, match="returned a LlamaModel alone"):
        load_model(f"{file}:headless")


def test_verify_takes_the_folder(tmp_path: Path) -> None:
    found = document("verify", folder(tmp_path), "--batch", "2", "--length", "8", "--ranks", "2")
    assert found["ok"]
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"config\.json cannot be read: OSError: .*not a valid JSON"),
        ("[1]", r"config\.json cannot be read"),
        ('{"a": 1}', r"config\.json cannot be read: ValueError: .*model_type"),
        ('{"model_type": "resnet"}', "has a resnet, and only causal language models can be built"),
        (json.dumps(SMALL | {"num_attention_heads": 5}), "num_attention_heads|attention heads"),
        (json.dumps(SMALL | {"hidden_size": 2**15, "intermediate_size": 2**17, "num_hidden_layers": 300}), "fewer layers"),
        (json.dumps(SMALL | {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}), r"config\.json cannot be read"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path / "config.json", text)
    write(tmp_path / "code.py", "raise SystemExit('the code of the folder runs')")
    with pytest.raises(GraphPPError, match=said) as caught:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_file_in_place_of_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphPPError, match=r"name the folder of the config\.json"):
        load_model(f"{folder(tmp_path)}/config.json")
    for option in ({"rows": 2**21}, {"length": 2**21}):
        with pytest.raises(GraphPPError, match=r"--(batch|length): take a positive integer up to 2\*\*20"):
            load_model(str(tmp_path), meta=True, **option)
