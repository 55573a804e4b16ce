"""`PipelineSFTTrainer` against TRL's own SFTTrainer in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graphpp.errors import GraphPPError
from tests.integrations.examples import run_example

trl = pytest.importorskip("trl")

PLAIN = {"graphpp.integrations.trl import (\n    PipelineSFTTrainer as": "trl import (", ', pipeline={"schedule": "1F1B"}': ""}
NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")


def example(output: Path, plain: bool) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The log and the adapter of the example, on two ranks, or with `plain` in its form for one process."""
    run_example("trl_sft.py", output, ranks=1 if plain else 2, changes=PLAIN if plain else None)
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return history, load_file(output / "final" / "adapter_model.safetensors")


def test_packed_lora_trains_as_in_one_process(tmp_path: Path) -> None:
    (found, adapter), (expected, values) = example(tmp_path / "own", False), example(tmp_path / "plain", True)
    for mine, theirs in zip(found, expected, strict=True):
        for name in NUMBERS:
            assert mine.get(name) == (pytest.approx(theirs[name], rel=1e-6) if name in theirs else None), name
    assert adapter.keys() == values.keys() and len(values) == 16
    for name, value in values.items():
        torch.testing.assert_close(adapter[name], value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings", [{"loss_type": "dft"}, {"activation_offloading": True}])
def test_settings_that_a_pipeline_cannot_follow_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    from graphpp.integrations.trl import PipelineSFTTrainer

    words = Tokenizer(models.WordLevel({str(at): at for at in range(8)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    small = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    rows = Dataset.from_list([{"input_ids": [1, 2, 3]}])
    args = trl.SFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False, **settings)
    with pytest.raises(GraphPPError, match="=".join(map(repr, *settings.items())).replace("'", ".?")):
        PipelineSFTTrainer(LlamaForCausalLM(LlamaConfig(**small)), args, train_dataset=rows, processing_class=tokenizer)
