"""A trainer whose `compute_loss` reads values: its metrics are those of one process, and no value has a part in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

import graphpp
from graphpp.integrations.transformers import PipelineMixin
from graphpp.integrations.value_reads import Unread, reads_postponed, with_outputs
from tests.exhaustive import further
from tests.integrations.test_transformers import trained


class Notes(Trainer):
    """Notes numbers of each batch."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.notes: dict[str, list[float]] = {"accuracy": [], "counts": []}
        self.tokens = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        output = model(**inputs)
        valid = inputs["labels"] != -100
        right = (output.logits.argmax(-1) == inputs["labels"]) & valid
        self.notes["accuracy"].append((right.sum() / valid.sum()).item() if valid.sum() > 0 else 0.0)
        self.notes["counts"] += valid.sum(-1)[:2].tolist()
        self.tokens += valid.sum().item() // 1
        self.log({"rows": float(len(valid)), "tokens": self.tokens})
        loss = self.loss_of(output, float(output.logits.detach().mean()))
        return (loss, output) if return_outputs else loss

    def loss_of(self, output: Any, mean: float) -> Tensor:
        loss: Tensor = output.loss
        return loss


class Own(PipelineMixin, Notes):
    reads_values = True


class Undeclared(PipelineMixin, Notes):
    pass


class LogsOnce(PipelineMixin, Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        output = model(**inputs)
        self.log({"own": output.loss})
        return (output.loss, output) if return_outputs else output.loss


class Scales(Own):
    def loss_of(self, output: Any, mean: float) -> Tensor:
        return super().loss_of(output, mean) * mean


class Branches(Own):
    def loss_of(self, output: Any, mean: float) -> Tensor:
        return super().loss_of(output, mean) if output.logits.sum() > 1e9 else super().loss_of(output, mean) * 2


SHORT = {"max_steps": 2, "per_device_train_batch_size": 2}
TIMES = dict.fromkeys(("train_runtime", "train_samples_per_second", "train_steps_per_second"))
ONE_LENGTH = (("train_dataset", [{"input_ids": torch.arange(6) + at} for at in range(8)]),)


def test_metrics_are_those_of_one_process(tmp_path: Path) -> None:
    mine = trained(Own, tmp_path, {}, ONE_LENGTH, **SHORT)
    theirs = trained(Notes, tmp_path, None, ONE_LENGTH, **SHORT)
    assert mine.notes == theirs.notes and len(mine.notes["accuracy"]) == 4
    assert mine.tokens == theirs.tokens == 48
    for found, expected in zip(mine.state.log_history, theirs.state.log_history, strict=True):
        assert {**found, **TIMES} == {**expected, **TIMES}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Undeclared, "reads the value of a tensor, by __bool__.*set reads_values = True"),
        (LogsOnce, "compute_loss calls self.log.*set reads_values = True"),
        (Branches, "a branch on one, changes the loss"),
        *further((Scales, "is nan in the captured pipeline")),
    ],
)
def test_values_that_the_loss_needs_are_refused(kind: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(graphpp.GraphPPError, match=words):
        trained(kind, tmp_path, {}, ONE_LENGTH, **SHORT)


def test_reads_of_a_capture_return_placeholders() -> None:
    class Owner:
        count = 0

    owner, x = Owner(), torch.arange(4.0)
    with reads_postponed(owner, True):
        number = 2 * x.sum().item() // 3 - round(float("1.5") + x[0].item())
        assert isinstance(number, Unread) and number > 5 and number < 5
        assert [type(each) for each in x.tolist()] == [Unread] * 4
        owner.count += number
        owner.more = number  # type: ignore[attr-defined]
        for use in (lambda: x * number, lambda: x[: x.sum().item()], lambda: torch.full((2,), number), lambda: int(x[0]),
                    lambda: range(number), x.numpy):  # fmt: skip
            with pytest.raises(graphpp.GraphPPError, match="compute_loss uses a number that it reads from a tensor"):
                use()
    assert owner.count == 0 and not hasattr(owner, "more")


def test_the_outputs_of_steps_are_added_to_the_memory_option() -> None:
    assert with_outputs(None) == graphpp.Memory(outputs=True)
    assert with_outputs("full") == with_outputs(graphpp.Memory(recompute="full")) == graphpp.Memory("full", outputs=True)
