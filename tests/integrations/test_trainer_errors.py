"""Faults of loops on several ranks, in accelerate and Trainer: an error that says what to change, at once, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("accelerate")
from accelerate.utils import (  # type: ignore[import-untyped]
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

import graphpp
from graphpp.integrations.accelerate import PipelineAccelerator
from graphpp.integrations.transformers import PipelineTrainer
from tests.distributed import run_ranks
from tests.integrations.examples import as_process
from tests.integrations.test_accelerate import Net
from tests.integrations.test_transformers import ROWS, collate, model


class Every2nd(torch.utils.data.Sampler[int]):
    """A sampler of a user's own, which gives each of two ranks its share."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter(range(self.rank, 16, 2))

    def __len__(self) -> int:
        return 8


def loop(rank: int, sampler: Any = None, after: Callable[..., object] = lambda *_: None) -> None:
    """A training of 4 steps; `after(accelerator, model)` is called after the second."""
    as_process(rank, 2)
    accelerator = PipelineAccelerator(cpu=True, loss=F.cross_entropy, pipeline={"microbatches": 2, "split": ["3"]})
    data = torch.utils.data.TensorDataset(torch.arange(96.0).reshape(16, 6) / 96, torch.arange(16) % 3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for at, (x, y) in enumerate(loader):
        accelerator.backward(net(x, target=y).loss)
        optimizer.step()
        if at == 1:
            after(accelerator, net)


class Calls(TrainerCallback):
    """Calls `work(trainer)` on the first rank after the second step."""

    def __init__(self, work: Callable[[Any], object]) -> None:
        self.trainer: Any = None
        self.work = work

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and args.process_index == 0:
            self.work(self.trainer)


def train(
    rank: int, folder: Path, work: Callable[[Any], object], kind: type = PipelineTrainer, net: Any = None, fsdp: bool = False
) -> None:
    as_process(rank, 2)
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args, calls = TrainingArguments(str(folder), **usual, **quiet, fsdp=fsdp), Calls(work)  # type: ignore[arg-type]
    data = {"data_collator": collate, "train_dataset": ROWS, "eval_dataset": ROWS[:5]}
    calls.trainer = kind(net or model(), args, **data, pipeline={}, callbacks=[calls])
    calls.trainer.train()


class Shards(PipelineTrainer):
    """A Trainer whose sampler shards the data set over the ranks."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return Every2nd(self.args.process_index)


def on_first(work: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    return lambda accelerator, net: work(accelerator, net) if accelerator.is_main_process else None


def evaluate(accelerator: PipelineAccelerator, net: nn.Module) -> None:
    net.eval()
    net(torch.zeros(4, 6))


def waits_or_evaluates(accelerator: PipelineAccelerator, net: nn.Module) -> None:
    accelerator.wait_for_everyone() if accelerator.is_main_process else evaluate(accelerator, net)


def optimizes_the_unwrapped(accelerator: PipelineAccelerator, net: nn.Module) -> None:
    """An optimizer of the original model, which has stand-ins for the parameters of other ranks by now, keeps this rank's."""
    made = torch.optim.SGD(accelerator.unwrap_model(net).parameters(), 0.1)
    held = accelerator.prepare(made).param_groups[0]["params"]
    assert [id(each) for each in held] == [id(each) for each in net.parameters()]
    net.requires_grad_(False).requires_grad_(True)


def shares(rank: int) -> Any:
    return torch.utils.data.DistributedSampler(range(16), 2, rank)  # type: ignore[arg-type]


def faults(rank: int, folder: Path) -> list[str]:
    alone: dict[str, Callable[[Any, Any], object]] = {
        "saves": lambda accelerator, _: accelerator.save_state(folder / "state"),
        "gathers": lambda accelerator, net: accelerator.get_state_dict(net),
        "evaluates": evaluate,
        "clips": lambda accelerator, net: accelerator.clip_grad_norm_(net.parameters(), 1.0),
    }
    cases: list[Callable[[], object]] = [
        *(lambda work=work: loop(rank, None, on_first(work)) for work in alone.values()),
        lambda: loop(rank, None, waits_or_evaluates),
        lambda: loop(rank, None, lambda accelerator, net: accelerator.clip_grad_norm_(net.original[0].parameters(), 1.0)),
        lambda: loop(rank, None, lambda _, net: DistributedDataParallel(net)),
        lambda: loop(rank, None, optimizes_the_unwrapped),
        lambda: loop(rank, shares(rank)),
        lambda: loop(rank, Every2nd(rank)),
        lambda: train(rank, folder, lambda trainer: trainer.save_model()),
        lambda: train(rank, folder, lambda trainer: trainer.evaluate()),
        lambda: train(rank, folder, print, Shards),
        lambda: train(rank, folder, print, net=DistributedDataParallel(model())),
        lambda: train(rank, folder, print, fsdp=True),
    ]
    return [raised(case) for case in cases]


def raised(case: Callable[[], object]) -> str:
    try:
        case()
    except graphpp.GraphPPError as error:
        return str(error)
    return "nothing"


CALL = "Every rank makes each call of a pipeline"
EXPECTED = [
    ("has step, the others have checkpoint", CALL),
    ("has step, the others have gather", CALL),
    ("has step, the others have eval, output=all", CALL),
    ("has step, the others have accelerator.clip_grad_norm_", CALL),
    ("differs in the call: it has eval, output=all, the others have accelerator.wait_for_everyone", CALL),
    ("clip_grad_norm_: the parameters lack 3.weight", "give model.parameters(), all of them"),
    ("DistributedDataParallel around a pipeline", "use the prepared model as it is"),
    ("nothing",),
    ("the loader's DistributedSampler gives each of 2 ranks another share", "leave the sampler out"),
    ("rank 1 differs in the values of args[0] of microbatch 0", "leave out samplers that give each rank its share"),
    ("has the logging of Trainer, the others have gather", CALL),
    ("has the logging of Trainer, the others have eval, output=all", CALL),
    ("rank 1 differs in the values of kwargs['input_ids']", "leave out samplers that give each rank its share"),
    ("DistributedDataParallel does not go with PipelineTrainer", "give the model itself"),
    ("FSDP does not go with PipelineTrainer", "leave fsdp= out"),
]


def test_a_fault_of_a_loop_is_named_on_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(faults, 2, tmp_path):
        assert len(found) == len(EXPECTED)
        for text, words in zip(found, EXPECTED, strict=True):
            assert all(each in text for each in words), (text, words)


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ({"fsdp_plugin": 1}, {}, "fsdp_plugin does not go with PipelineAccelerator: leave it out"),
        ({"deepspeed_plugin": 1}, {}, "deepspeed_plugin does not go with"),
        ({"megatron_lm_plugin": 1}, {}, "megatron_lm_plugin does not go with"),
        ({"parallelism_config": 1}, {}, "parallelism_config does not go with"),
        ({"dynamo_backend": "inductor"}, {}, 'give pipeline={"backend": "inductor"} in its place'),
        ({"mixed_precision": "fp16"}, {}, "mixed_precision='fp16' does not go with .*: give \"bf16\" or \"no\""),
        ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, {}, "dispatch_batches does not go with"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs()]}, {}, "DistributedDataParallelKwargs does not go with"),
        ({"pipeline": {"plan": 1}}, {}, "pipeline\\['plan'\\] does not go with"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP does not go with"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED does not go with"),
        ({}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "ACCELERATE_DYNAMO_BACKEND does not go with"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision='fp8' does not go with"),
    ],
)
def test_settings_of_accelerate_are_refused(monkeypatch: Any, arguments: Any, variables: Any, words: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(graphpp.GraphPPError, match=words):
        PipelineAccelerator(cpu=True, **arguments)


def test_models_and_hooks_of_accelerate_are_refused() -> None:
    as_process(0, 1)
    accelerator = PipelineAccelerator(cpu=True, loss=F.cross_entropy)
    spread = Net()
    spread.hf_device_map = {"0": "cpu", "3": "disk"}  # type: ignore[assignment]
    with pytest.raises(graphpp.GraphPPError, match="device_map does not go with PipelineAccelerator: load the model without"):
        accelerator.prepare(spread)
    with pytest.raises(graphpp.GraphPPError, match="load_state: there is no pipeline before prepare was given the model"):
        accelerator.load_state("nowhere")
    net = accelerator.prepare(Net())
    with pytest.raises(graphpp.GraphPPError, match="prepare was given a second model, Linear"):
        accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(graphpp.GraphPPError, match="save_state: there is no pipeline before a batch was run"):
        accelerator.save_state("nowhere")
    with pytest.raises(graphpp.GraphPPError, match="register_save_state_pre_hook does not go with"):
        accelerator.register_save_state_pre_hook(print)
    batch = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(graphpp.GraphPPError, match=r"call model\.train\(\) before"), torch.no_grad():
        accelerator.backward(net(batch[0], target=batch[1]).loss)
    with pytest.raises(graphpp.GraphPPError, match="the optimizer holds 2 parameters that are not the model's"):
        accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))


def counted(rank: int, ranks: int, kind: type, folder: Path) -> list[Any]:
    """Trainer's numbers that depend on how many items it counts on a rank."""
    as_process(rank, ranks)
    changes = {"average_tokens_across_devices": False, "include_num_input_tokens_seen": "non_padding"}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
    args = TrainingArguments(str(folder), gradient_accumulation_steps=2, logging_steps=1, **quiet, **changes)  # type: ignore[arg-type]
    options = {"pipeline": {}} if kind is PipelineTrainer else {}
    trainer = kind(model(), args, data_collator=collate, train_dataset=ROWS[:16], **options)
    trainer.train()
    first, last = trainer.state.log_history
    return [first["loss"], first["grad_norm"], last["total_flos"], trainer.state.num_input_tokens_seen]


def test_trainer_counts_the_items_of_one_process(tmp_path: Path) -> None:
    own = run_ranks(counted, 2, 2, PipelineTrainer, tmp_path)
    assert own == [counted(0, 1, Trainer, tmp_path)] * 2
