"""`PipelineStrategy` against Lightning in one process: logs, metrics, weights, checkpoints, refusals."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")

from graphpp.errors import CaptureError, GraphPPError  # noqa: E402 - after the check that lightning is there
from graphpp.integrations.lightning import PipelineStrategy  # noqa: E402
from tests.exhaustive import further  # noqa: E402
from tests.integrations.examples import run_example  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A strategy leaves its process group, of one rank here, and the environment of a launched process."""
    with patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Classifier(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.scale, self.seen = 1.0, []

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch) * self.scale
        self.log("loss", loss)
        self.log_dict({"scale": self.scale, "double": 2 * loss}, on_epoch=True, prog_bar=True)
        return {"loss": loss, "more": loss.detach() + 1}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(outputs["loss"].item())

    def on_train_epoch_end(self) -> None:
        self.scale /= 2

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Measured(Classifier):
    """With metrics of all forms, an index that the code reads, and predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        both = {"a": torchmetrics.classification.MulticlassAccuracy(3), "f": torchmetrics.classification.MulticlassF1Score(3)}
        self.both, self.sum = torchmetrics.MetricCollection(both), torchmetrics.SumMetric()

    def validation_step(self, batch: Any, index: int) -> torch.Tensor:
        out = self.net(batch["x"])
        value = self.accuracy(out, batch["y"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("of the batch", value)
        self.both.update(out, batch["y"])
        self.log_dict(self.both)
        self.sum.update(out.sum())
        self.log("index", float(index))
        self.log("rows", len(out), reduce_fx="sum", batch_size=len(out))
        return out

    def on_validation_epoch_end(self) -> None:
        self.log("sum", self.sum.compute())
        self.sum.reset()

    def predict_step(self, batch: Any, index: int) -> Any:
        return {"probabilities": self.net(batch["x"]).softmax(-1), "index": index}


def drawn(rows: int) -> Any:
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=draw), "y": int(torch.randint(3, (), generator=draw))} for _ in range(rows)]


def loader(rows: int, batch: int, shuffle: bool = True) -> Any:
    return DataLoader(drawn(rows), batch, shuffle=shuffle)


def trained(module: Any, batch: int, rows: int = 32, strategy: Any = None, **changes: Any) -> Any:
    pl.seed_everything(1, verbose=False)
    ways = {} if strategy is None else {"strategy": strategy}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 2, **quiet, **ways, **changes})
    trainer.fit(module, loader(rows, batch), loader(6, 4, shuffle=False) if isinstance(module, Measured) else None)
    return trainer


@pytest.mark.parametrize("changes", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}])
def test_weights_have_the_bits_of_accumulated_microbatches(changes: dict[str, Any]) -> None:
    one, own = Classifier(), Classifier()
    trained(one, 2, accumulate_grad_batches=4, **changes)
    trainer = trained(own, 8, strategy=PipelineStrategy(microbatches=4), **changes)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(own.parameters(), one.parameters(), strict=True))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


def test_logs_and_metrics_of_a_short_last_batch() -> None:
    one, own = Measured(), Measured()
    expected = trained(one, 8, rows=22)
    found = trained(own, 8, rows=22, strategy=PipelineStrategy(microbatches=4))
    assert own.seen == pytest.approx(one.seen, rel=1e-6) and len(own.seen) == 6
    assert found.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        assert found.callback_metrics[name].item() == pytest.approx(value.item(), rel=1e-6), name
    both = ((found, own), (expected, one))
    mine, theirs = (each.validate(module, loader(6, 4, False), verbose=False)[0] for each, module in both)
    assert mine == pytest.approx(theirs)
    answers = [each.predict(module, loader(6, 4, False)) for each, module in both]
    for mine, theirs in zip(*answers, strict=True):
        assert mine["index"] == theirs["index"]
        torch.testing.assert_close(mine["probabilities"], theirs["probabilities"])


@pytest.mark.parametrize("launched", [False, *further(True)])
def test_the_example_trains_on_two_processes_and_resumes_on_one(launched: bool, tmp_path: Path) -> None:
    """`launched`: Lightning starts the second process."""
    for name, epochs in {"two": "3", "half": "2"}.items():
        run_example("lightning_trainer.py", tmp_path / name, "2", epochs, ranks=2 - launched, launched=launched)
    middle, end = (next((tmp_path / name).rglob("*.ckpt")) for name in ("half", "two"))
    assert {each.name for each in end.parent.iterdir()} == {end.name, f"{end.name}.graphpp"}
    run_example("lightning_trainer.py", tmp_path / "one", "1", "3", str(middle))
    states = [torch.load(path, weights_only=False) for path in (end, next((tmp_path / "one").rglob("*.ckpt")))]
    whole, resumed = (each["state_dict"] for each in states)
    assert states[0]["global_step"] == states[1]["global_step"] == 12 and whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Nothing(Classifier):
    def training_step(self, batch: Any, index: int) -> Any:
        return None


class Beside(Classifier):
    def training_step(self, batch: Any, index: int) -> Any:
        return {"loss": self.loss(batch), "outputs": self.net(batch["x"])}


class Largest(Classifier):
    def training_step(self, batch: Any, index: int) -> Any:
        self.log("largest", batch["x"].max(), reduce_fx="max")
        return self.loss(batch)


class MeasuredTraining(Measured):
    def training_step(self, batch: Any, index: int) -> Any:
        self.accuracy(self.net(batch["x"]), batch["y"])
        return self.loss(batch)


class Computing(Measured):
    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("error", 1 - self.accuracy(self.net(batch["x"]), batch["y"]))


class Direct(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self(batch)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Manual, "automatic_optimization=False"),
        (Nothing, "training_step returned None"),
        (Beside, "training_step returned 'outputs' of shape"),
        (Largest, "reduce_fx='max'"),
        (MeasuredTraining, "training_step calls the metric accuracy"),
        (Computing, "accuracy: a step that is captured calls its metrics afterwards"),
        (Direct, "is not called directly"),
    ],
)
def test_refusals(kind: type, words: str) -> None:
    with pytest.raises((GraphPPError, CaptureError), match=words):
        trained(kind(), 8, strategy=PipelineStrategy(microbatches=4))


class OneShot(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = iter(drawn(32))

    def __iter__(self) -> Iterator[Any]:
        return self.rows


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataLoader(OneShot(), 8), "the training data can be read once"),
        (DataLoader(drawn(32), 8, sampler=DistributedSampler(drawn(32), 2, 0)), "gives each of 2 ranks another share"),
    ],
)
def test_loaders_that_a_pipeline_cannot_read_are_refused(data: Any, words: str) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    with pytest.raises(GraphPPError, match=words):
        pl.Trainer(accelerator="cpu", devices=1, strategy=PipelineStrategy(), **quiet).fit(Classifier(), data)


def test_a_checkpoint_of_lightning_is_refused(tmp_path: Path) -> None:
    trained(Classifier(), 8).save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(GraphPPError, match="has no folder"):
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=PipelineStrategy(), logger=False, enable_progress_bar=False)
        trainer.fit(Classifier(), loader(32, 8), ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(GraphPPError, match="mesh= does not go with PipelineStrategy"):
        PipelineStrategy(mesh=None)
    with pytest.raises(GraphPPError, match=r"schedul= does not .* it is no option of graphpp.compile; take one of example"):
        PipelineStrategy(schedul="1F1B")
