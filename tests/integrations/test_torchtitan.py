"""torchtitan's trainer with graphpp's pipeline against the same trainer with torchtitan's own: equal bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.integrations.titan import ARGUMENTS, InTurns, initial_values, on_cpu, parameters, trained, trainer

if find_spec("torchtitan") is None:  # its import needs Triton, which `on_cpu` replaces
    pytest.skip("torchtitan is not installed", allow_module_level=True)
if not version("torchtitan").startswith("0.2."):
    pytest.skip("the helper drives torchtitan 0.2", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # of torchtitan and its dependencies


def both(rank: int, ranks: int, folder: Path, *arguments: str) -> tuple[Any, Any]:
    with on_cpu() as train:
        mine = trainer(train, ranks, folder, *arguments)
        expected = initial_values(mine)
        assert all(torch.equal(value, expected[name]) for name, value in parameters(mine).items())
        return trained(mine), trained(trainer(train, ranks, folder, *arguments, own=True))


@pytest.mark.parametrize(
    ("ranks", "schedule", "more"),
    [
        (2, "1F1B", ("--training.global_batch_size=8", "--validation.enable", "--validation.steps=2", "--validation.freq=2",
                     "--validation.seq_len=24", "--validation.local_batch_size=2")),
        *further((2, "Interleaved1F1B", ()), (2, "ZBVZeroBubble", ("--activation_checkpoint.mode=full",)), (4, "1F1B", ()),
                 (4, "Interleaved1F1B", ()), (4, "ZBVZeroBubble", ())),
    ],
)  # fmt: skip
def test_a_training_is_that_of_torchtitans_own_pipeline(ranks: int, schedule: str, more: Any, tmp_path: Path) -> None:
    found = run_ranks(both, ranks, ranks, tmp_path, f"--parallelism.pipeline_parallel_schedule={schedule}", *more)
    whole: list[dict[str, torch.Tensor]] = [{}, {}]
    for logs, values in (zip(*rank, strict=True) for rank in found):
        assert logs[0] == logs[1] and len(logs[0]) >= 3 + 2 * ("--validation.enable" in more)
        for into, parts in zip(whole, values, strict=True):
            into.update(parts)
    assert whole[0].keys() == whole[1].keys() and all(torch.equal(whole[0][name], value) for name, value in whole[1].items())


def replicas(rank: int, folder: Path, replicate: int, shard: int) -> list[Any]:
    prefix = "--parallelism.data_parallel_"
    more = f"{prefix}replicate_degree={replicate}", f"{prefix}shard_degree={shard}"
    with on_cpu() as train:
        return trained(trainer(train, 2, folder, "--model.flavor=small", *more))[0]


def accumulated(rank: int, folder: Path) -> list[Any]:
    """torchtitan's own pipeline over the batches of two data ranks, one after the other."""
    with on_cpu() as train:
        from torchtitan.protocols.train_spec import get_train_spec

        spec = get_train_spec("bytes")
        loader = spec.build_dataloader_fn
        spec.build_dataloader_fn = lambda dp_rank, **named: InTurns([loader(dp_rank=rank, **named) for rank in range(2)])
        return trained(trainer(train, 2, folder, "--model.flavor=small", "--training.global_batch_size=8", own=True))[0]


@pytest.mark.parametrize(("replicate", "shard"), further((1, 2), (2, 1)))
def test_data_ranks_train_as_one_pipeline_over_all_their_rows(replicate: int, shard: int, tmp_path: Path) -> None:
    expected = run_ranks(accumulated, 2, tmp_path)[1]
    found = run_ranks(replicas, 4, tmp_path, replicate, shard)[3]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[1] == pytest.approx(theirs[1], rel=1e-5) and mine[3] == pytest.approx(theirs[3], rel=1e-4)


def saving(interval: int) -> tuple[str, ...]:
    whole = ("--model.flavor=small", "--checkpoint.enable", "--checkpoint.no-last-save-model-only")
    return (*whole, f"--checkpoint.interval={interval}", "--training.steps=4", "--lr_scheduler.total_steps=8")


def resuming(folder: Path, step: int) -> tuple[str, ...]:
    path = folder / "checkpoint" / f"step-{step}"
    return (f"--checkpoint.initial_load_path={path}", "--checkpoint.no-initial-load-model-only")


def resumed(rank: int, folder: Path) -> None:
    """graphpp's run of 4 steps; torchtitan's pipeline goes on from its step 2, and graphpp's from torchtitan's step 3."""
    with on_cpu() as train:
        whole, _ = trained(trainer(train, 2, folder / "mine", *saving(2)))
        second, values = trained(trainer(train, 2, folder / "own", *saving(3), *resuming(folder / "mine", 2), own=True))
        third, found = trained(trainer(train, 2, folder / "again", *saving(3), *resuming(folder / "own", 3)))
    assert whole[2:] == second and whole[3:] == third
    assert all(torch.equal(found[name], value) for name, value in values.items())


def loaded(rank: int, ranks: int, folder: Path, step: int, into: Path, own: bool) -> dict[str, torch.Tensor]:
    """The parameters that a run takes from a checkpoint; it trains one step more, and saves."""
    with on_cpu() as train:
        made = trainer(train, ranks, into, *saving(1), f"--training.steps={step + 1}", *resuming(folder, step), own=own)
        made.checkpointer.load()
        values = {name: value.detach().clone() for name, value in parameters(made).items()}
        trained(made)
    return values


def test_checkpoints_fit_torchtitans_pipeline_and_its_run_without_one(tmp_path: Path) -> None:
    run_ranks(resumed, 2, tmp_path)
    first, second = run_ranks(loaded, 2, 2, tmp_path / "mine", 2, tmp_path / "two", False)
    (whole,) = run_ranks(loaded, 1, 1, tmp_path / "mine", 2, tmp_path / "one", True)
    assert whole.keys() == first.keys() | second.keys()
    assert all(torch.equal(whole[name], value) for name, value in (first | second).items())
    (after,) = run_ranks(loaded, 1, 1, tmp_path / "one", 3, tmp_path / "end", True)
    first, second = run_ranks(loaded, 2, 2, tmp_path / "one", 3, tmp_path / "back", False)
    assert all(torch.equal(after[name], value) for name, value in (first | second).items())


def refused(rank: int) -> dict[str, str]:
    """The sentence for each setting that the pipeline cannot follow, before anything is captured."""
    cases: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "tp": (("--parallelism.tensor_parallel_degree=2",), {}),
        "batch": (("--parallelism.pipeline_parallel_microbatch_size=3",), {}),
        "offload": (("--training.enable_cpu_offload",), {}),
        "backend": (("--compile.enable", "--compile.backend=aot_eager"), {}),
        "option": ((), {"microbatches": 2}),
        "masks": ((), {}),
        "schedule": (("--parallelism.pipeline_parallel_schedule=V-Half",), {}),
    }
    found: dict[str, str] = {}
    with on_cpu():
        from torchtitan.config import ConfigManager
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.attention import FlexAttentionWrapper

        from graphpp.integrations.torchtitan import pipelining_fn

        layers = torch.nn.ModuleDict({"0": torch.nn.Linear(1, 1)})
        plain = torch.nn.Sequential(OrderedDict(layers=layers, norm=torch.nn.Linear(1, 1)))
        for name, (arguments, pipeline) in cases.items():
            config = ConfigManager().parse_args([*ARGUMENTS[:-1], *arguments])
            tp = config.parallelism.tensor_parallel_degree
            dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=2, ep=1, etp=1, world_size=2 * tp)
            with pytest.raises(graphpp.GraphPPError) as caught:
                model = torch.nn.Sequential(FlexAttentionWrapper()) if name == "masks" else plain
                pipelining_fn(model, dims, config, torch.device("cpu"), None, None, None, pipeline=pipeline)
            found[name] = str(caught.value)
    return found


def test_refusals() -> None:
    (found,) = run_ranks(refused, 1)
    words = {
        "tp": "parallelism.tensor_parallel_degree does not go with graphpp's pipelining_fn: take 1, and spread",
        "batch": "training.local_batch_size does not go with graphpp's pipelining_fn: take a multiple of 3",
        "offload": "training.enable_cpu_offload does not go",
        "backend": 'compile.backend does not go with graphpp\'s pipelining_fn: take "inductor"',
        "option": "pipeline['microbatches'] does not go",
        "masks": "attention with masks (flex, varlen) does not go with graphpp's pipelining_fn: take the flavor with attn_type",
        "schedule": "parallelism.pipeline_parallel_schedule: Unknown schedule name 'V-Half'",
    }
    assert {name: found[name] for name, text in words.items() if text not in found[name]} == {}
