"""`PipelineSFTTrainer` and `PipelineDPOTrainer` against TRL's own trainers in one process: logs, metrics, weights, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import graphpp
from graphpp.errors import GraphPPError
from tests.exhaustive import further
from tests.integrations.examples import run_example

trl = pytest.importorskip("trl")

TIMES = ("runtime", "per_second", "preparation_time")
SHORT_SFT = {"layers=4": "layers=2", "max_steps=3": "max_steps=2", "eval_steps=3": "eval_steps=2", "steps=4": "steps=2"}
SHORT_DPO = {"accumulation_steps=4": "accumulation_steps=2", "max_steps=2": "max_steps=1", "eval_steps=2": "eval_steps=1"}
LORA = {'own = {"ref_model": copy.deepcopy(model)}': "own = {'peft_config': __import__('peft').LoraConfig(r=4)}"}


def example(script: str, output: Path, plain: bool, changes: Mapping[str, str]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The log and the weights of an example, on two ranks, or with `plain` in its form for one process."""
    own = "PipelineSFTTrainer" if "sft" in script else "PipelineDPOTrainer"
    plainly = {f"graphpp.integrations.trl import (\n    {own} as": "trl import (", ', pipeline={"schedule": "1F1B"}': ""}
    run_example(script, output, ranks=1 if plain else 2, changes={**changes, **(plainly if plain else {})} or None)
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return timeless(history), load_file(next((output / "final").glob("*model.safetensors")))


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if not any(word in name for word in TIMES)} for each in history]


@pytest.mark.parametrize(
    ("script", "changes", "metric", "tensors"),
    [
        ("trl_sft.py", SHORT_SFT, "mean_token_accuracy", 8),
        ("trl_dpo.py", SHORT_DPO, "rewards/margins", 21),
        *further(
            ("trl_sft.py", {}, "mean_token_accuracy", 16),
            ("trl_dpo.py", {}, "rewards/margins", 21),
            ("trl_dpo.py", LORA, "rewards/margins", 8),
        ),
    ],
)
def test_an_example_logs_and_saves_what_one_process_does(
    script: str, changes: dict[str, str], metric: str, tensors: int, tmp_path: Path
) -> None:
    found, weights = example(script, tmp_path / "own", False, changes)
    expected, values = example(script, tmp_path / "plain", True, changes)
    assert found == expected and {metric, f"eval_{metric}"} <= set().union(*found)
    assert weights.keys() == values.keys() and len(values) == tensors
    assert all(torch.equal(weights[name], value) for name, value in values.items())


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, **{str(at): at for at in range(2, 32)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model(seed: int = 0) -> LlamaForCausalLM:
    set_seed(seed)
    small = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**small))


QUIET = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
         "gradient_checkpointing": False, "max_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2,
         "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}  # fmt: skip


OTHER_LOSSES = ["hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
                "apo_down", "discopop", "sigmoid_norm"]  # fmt: skip


def pairs() -> Any:
    from datasets import Dataset

    numbers = torch.randint(2, 32, (8, 3, 4), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [[" ".join(map(str, words)) for words in row] for row in numbers]
    return Dataset.from_list([{"prompt": a, "chosen": f" {b} <eos>", "rejected": f" {c} <eos>"} for a, b, c in rows])


def adapted(net: LlamaForCausalLM) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def preferred(own: bool, settings: dict[str, Any], reference: str, pipeline: dict[str, Any], folder: Path) -> list[Any]:
    """The log of a training by preferences, and the results of a prediction."""
    from graphpp.integrations.trl import PipelineDPOTrainer

    net = adapted(model()) if reference == "adapter" else model()
    given = {"pipeline": pipeline} if own else {}
    if reference == "model":
        given["ref_model"] = model(1)  # type: ignore[assignment]
    args = trl.DPOConfig(str(folder / f"{own}"), **{**QUIET, **settings})
    rows = {"train_dataset": pairs(), "eval_dataset": pairs().select(range(4)), "processing_class": tokenizer()}
    trainer = (PipelineDPOTrainer if own else trl.DPOTrainer)(net, args=args, **rows, **given)
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    return [*timeless(trainer.state.log_history), timeless([predicted.metrics]), predicted.predictions.tolist()]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("settings", "reference", "pipeline"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}, "model", {"microbatches": 2}),
        *further(
            ({"precompute_ref_log_probs": True}, "model", {}),
            ({"precompute_ref_log_probs": True}, "none", {}),
            ({}, "adapter", {}),
            ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, "model", {}),
            ({"loss_type": "ipo", "use_weighting": True, "ld_alpha": 0.5}, "model", {}),
            ({"loss_type": OTHER_LOSSES, "label_smoothing": 0.1}, "model", {}),
        ),
    ],
)
def test_a_training_by_preferences_logs_what_trl_logs(settings: Any, reference: str, pipeline: Any, tmp_path: Path) -> None:
    """Bit-equal, but for batches that are cut: their sums are in another order."""
    found = preferred(True, settings, reference, pipeline, tmp_path)
    expected = preferred(False, settings, reference, pipeline, tmp_path)
    if not pipeline:
        assert found == expected
        return
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "setting"), [("SFT", "activation_offloading"), ("DPO", "activation_offloading"), ("DPO", "sync_ref_model")]
)
def test_settings_that_a_pipeline_cannot_follow_are_refused(kind: str, setting: str, tmp_path: Path) -> None:
    import graphpp.integrations.trl as own

    args = getattr(trl, f"{kind}Config")(str(tmp_path), report_to="none", use_cpu=True, bf16=False, **{setting: True})
    with pytest.raises(GraphPPError, match=f"{setting}=True does not go with Pipeline{kind}Trainer"):
        getattr(own, f"Pipeline{kind}Trainer")(model(), args=args, train_dataset=pairs(), processing_class=tokenizer())


def test_trl_keeps_its_kernels_outside_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    import graphpp.integrations.trl as adapter

    monkeypatch.setattr(adapter, "_use_triton", lambda device: True)
    cpu, asked = torch.device("cpu"), []
    model = torch.nn.Linear(2, 1)
    model.register_forward_hook(lambda module, args, output: asked.append(chunked_logprob._use_triton(cpu)))
    graphpp.compile(model, lambda output: output.sum(), microbatches=1, example=graphpp.Microbatch((torch.ones(2, 2),)))
    assert asked and not any(asked) and utils._use_triton(cpu)
