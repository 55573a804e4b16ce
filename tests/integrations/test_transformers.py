"""`PipelineTrainer` against transformers' own Trainer in one process: logs, predictions, checkpoints, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    set_seed,
)

import graphpp
from graphpp.integrations.transformers import PipelineMixin, PipelineTrainer
from tests.exhaustive import further
from tests.integrations.examples import run_example

TIMES = ("runtime", "per_second", "preparation_time")


ONE_LENGTH = {"20 + at % 9": "28", "layers=4": "layers=2"}  # a capture whose rows vary in length takes several times as long
FEW = {"max_steps=40": "max_steps=4", "_steps=20": "_steps=2", "logging_steps=10": "logging_steps=1"}
PLAIN = {
    "graphpp.integrations.transformers import PipelineTrainer as": "transformers import",
    ', pipeline={"schedule": "1F1B"}': "",
}


def example(output: Path, *more: str, plain: bool = False, ranks: int = 2, whole: bool) -> None:
    """Run the example, or with `plain` its form for one process. `whole`: as it stands, by torchrun."""
    changes = {**FEW, **({} if whole else ONE_LENGTH), **(PLAIN if plain else {})}
    run_example("tutorials/trainer.py", output, *more, ranks=1 if plain else ranks, changes=changes, launched=whole)


def logs(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return [{name: value for name, value in entry.items() if not any(word in name for word in TIMES)} for entry in history]


@pytest.mark.parametrize("whole", [False, *further(True)])
def test_the_example_trains_as_one_process_and_resumes_on_other_ranks(whole: bool, tmp_path: Path) -> None:
    """Training is bit-equal; the loss of an evaluation may differ in its last bit."""
    own, plain = tmp_path / "own", tmp_path / "plain"
    example(own, whole=whole)
    example(plain, plain=True, whole=whole)
    check_equal(logs(own), logs(plain))
    weights = load_file(own / "final" / "model.safetensors")
    expected = load_file(plain / "final" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    loaded = LlamaForCausalLM.from_pretrained(own / "final")
    assert torch.equal(loaded.lm_head.weight, expected["lm_head.weight"])
    (own / "checkpoint-4").rename(own / "first")
    example(own, "resume", ranks=1, whole=whole)
    check_equal(logs(own), logs(plain))
    again = load_file(own / "final" / "model.safetensors")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def check_equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == (pytest.approx(value, rel=3e-7) if name == "eval_loss" else value), name


def model() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(config)


def sequences(count: int, *lengths: int) -> list[dict[str, Tensor]]:
    drawn = [torch.Generator().manual_seed(at) for at in range(count)]
    return [{"input_ids": torch.randint(64, (lengths[at % len(lengths)],), generator=each)} for at, each in enumerate(drawn)]


ROWS, PADDED = sequences(24, 8), sequences(22, 6, 7, 8)


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in batch]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels != -100).long()}


def trained(kind: type, folder: Path, pipeline: dict[str, Any] | None = None, more: Any = (), **changes: Any) -> Any:
    """A trainer after its training; the rows of `PADDED` end in a short batch."""
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 1}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(str(folder), **{**usual, **quiet, **changes})  # type: ignore[arg-type]
    own = {} if pipeline is None else {"pipeline": pipeline}
    data = {"train_dataset": ROWS, "eval_dataset": ROWS[:5], **dict(more)}
    trainer = kind(model(), args, data_collator=collate, **data, **own)
    trainer.train()
    return trainer


def mean_of_squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs.logits.square().sum() / num_items_in_batch


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    ("changes", "more", "pipeline"),
    [
        ({}, (("train_dataset", PADDED), ("eval_dataset", PADDED[:5])), {}),
        ({"label_smoothing_factor": 0.1}, (), {}),
        ({"bf16": True}, (), {}),
        *further(
            ({}, (("compute_loss_func", mean_of_squares),), {}),
            ({"gradient_checkpointing": True}, (), {"memory": "full"}),
            ({"max_grad_norm": 0.0, "optim": "sgd"}, (), {}),
            ({"gradient_accumulation_steps": 1}, (), {"microbatches": 2}),
        ),
    ],
)
def test_a_training_logs_what_trainer_logs(tmp_path: Path, changes: Any, more: Any, pipeline: dict[str, Any]) -> None:
    theirs = trained(Trainer, tmp_path, None, more, **changes)
    mine = trained(PipelineTrainer, tmp_path, pipeline, more, **changes)
    assert ("torch.bfloat16" in str(mine.pipe.programs(0))) == ("bf16" in changes)
    rough = 1e-2 if changes.get("bf16") else 1e-6
    exact = {"rel": 0.0, "abs": 0.0}
    close = {"rel": 3e-4} if changes.get("bf16") else {"rel": 1e-5} if pipeline.get("microbatches") else exact
    for found, expected in zip(mine.state.log_history, theirs.state.log_history, strict=True):
        for name, value in expected.items():
            if not any(word in name for word in TIMES):
                assert found[name] == pytest.approx(value, **close), name
    assert mine.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=rough)
    one, other = mine.predict(ROWS[:5]).predictions, theirs.predict(ROWS[:5]).predictions
    assert torch.from_numpy(one).sub(torch.from_numpy(other)).abs().max() < rough


def test_evaluations_weigh_short_batches_as_trainer_does_and_training_goes_on(tmp_path: Path) -> None:
    """Trainer resets its gather function after each evaluation; a second `train` keeps the optimizer."""
    found = []
    for kind, pipeline in ((Trainer, None), (PipelineTrainer, {})):
        trainer = trained(kind, tmp_path, pipeline, per_device_eval_batch_size=3, max_steps=2)
        losses = [trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]]
        rows = len(trainer.predict(ROWS[:5]).predictions)
        trainer.train()
        found.append([*losses, rows, trainer.state.log_history[-1]["train_loss"], trainer.state.num_input_tokens_seen])
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class OneShot(torch.utils.data.IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = iter(ROWS)

    def __iter__(self) -> Any:
        return self.rows


class CallsTwice(PipelineMixin, Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return model(**inputs).loss + model(**inputs).loss


class CallsNone(PipelineMixin, Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return torch.zeros(())


@pytest.mark.parametrize(
    ("kind", "pipeline", "changes", "more", "words"),
    [
        (PipelineTrainer, {"gradients": "mean"}, {}, (), "pipeline\\['gradients'\\] does not go with PipelineTrainer"),
        (PipelineTrainer, {"schedul": "1F1B"}, {}, (), "pipeline\\['schedul'\\] does not .* no option of graphpp.compile"),
        (PipelineTrainer, {"microbatches": 0}, {}, (), "pipeline\\['microbatches'\\] does not .* number of parts of each"),
        (PipelineTrainer, {}, {"torch_compile": True}, (), 'give pipeline={"backend": "inductor"}'),
        (PipelineTrainer, {}, {}, (("optimizers", (torch.optim.SGD(model().parameters()), None)),), "give optimizer_cls_and"),
        (PipelineTrainer, {}, {"load_best_model_at_end": True, "save_only_model": True, "save_strategy": "steps",
                               "eval_strategy": "steps"}, (), "load_best_model_at_end needs whole ones"),
        (PipelineTrainer, {}, {"max_steps": 2}, (("train_dataset", OneShot()),), "the training data can be read once"),
        (CallsTwice, {}, {}, (), "calls the model more than once"),
        (CallsNone, {}, {}, (), "compute_loss does not call the model"),
    ],
)
def test_refusals(tmp_path: Path, kind: type, pipeline: Any, changes: Any, more: Any, words: str) -> None:
    with pytest.raises(graphpp.GraphPPError, match=words):
        trained(kind, tmp_path, pipeline, more, **changes)


class Generates(PipelineMixin, Seq2SeqTrainer):
    pass


def test_generation_in_an_evaluation_is_refused(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, predict_with_generate=True)
    with pytest.raises(graphpp.GraphPPError, match="predict_with_generate=True does not go with PipelineTrainer: leave it out"):
        Generates(model(), args, pipeline={})


def test_a_checkpoint_of_trainer_is_refused(tmp_path: Path) -> None:
    trained(Trainer, tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer = trained(PipelineTrainer, tmp_path / "own", {}, max_steps=1)
    with pytest.raises(graphpp.GraphPPError, match="has no folder 'graphpp', so no PipelineTrainer wrote it"):
        trainer.train(resume_from_checkpoint=str(next(tmp_path.glob("checkpoint-*"))))
