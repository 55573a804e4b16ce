"""The benchmarks start, and their contenders compute the same numbers; the measurements are in RESULTS.md.

No compiler runs here: the compiled contenders differ from the eager ones by one argument. `make test` imports every script and
runs one contender; `make test-all` runs the scripts.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphpp
from graphpp.schedules.table.actions import Kind
from tests.exhaustive import further

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def sibling(name: str, monkeypatch: pytest.MonkeyPatch, folder: str = "benchmarks") -> ModuleType:
    """A script of a folder as a module; such a script imports its siblings by their bare names."""
    monkeypatch.syspath_prepend(str(ROOT / folder))
    for path in (ROOT / folder).glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module(name)


def case(contenders: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str = "auto") -> Any:
    workloads = sys.modules["workloads"]
    size = workloads.Size(dim=16, layers=3, length=9, dropout=0.1)
    return contenders.Case(workloads.workload(name, size), schedule, microbatches=3, rows=2)


@pytest.mark.parametrize("name", ["llama", *further("gpt2", "moe", "vit", "resnet")])
def test_a_pipeline_and_manual_stages_compute_what_the_model_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = sibling("contenders", monkeypatch)
    calm = case(contenders, monkeypatch, name).without_dropout()
    plain = contenders.plain_step(calm, CPU)
    piped = contenders.pipeline_step(contenders.pipeline(calm, CPU), calm, CPU)
    assert torch.equal(plain.losses(), piped.losses())
    for mine, theirs in zip(plain.parameters, piped.parameters, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    model, (inputs, _) = calm.workload.model(), calm.batch(CPU)
    value = inputs
    for start in range(3):
        value = calm.workload.part(model, start, start + 1)(value)
    assert torch.equal(value, model(inputs))


def test_experts_take_no_more_than_their_places_and_tokens_go_where_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = sibling("blocks", monkeypatch)
    torch.manual_seed(0)
    experts = blocks.Experts(4, 8, experts=4, top=2, room=1.0)
    torch.nn.init.normal_(experts.router.weight)
    tokens = torch.randn(10, 4)
    weights = experts.places(tokens)  # [tokens, experts, places]
    assert weights.shape == (10, 4, 5)
    assert ((weights > 0).sum(0) <= 1).all()  # a place has one token
    assert ((weights > 0).sum((1, 2)) <= 2).all()  # a token has at most two experts
    chosen = experts.router(tokens).topk(2, -1).indices
    wanted = torch.zeros(10, 4, dtype=torch.bool).scatter(1, chosen, value=True)
    seated = (weights > 0).any(-1)
    assert not (seated & ~wanted).any()
    for expert in range(4):  # the first ones that want it have it
        assert torch.equal(seated[:, expert].nonzero().flatten(), wanted[:, expert].nonzero().flatten()[:5])


def test_losses_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = sibling("contenders", monkeypatch)
    right = contenders.Step([], lambda: torch.ones(4))
    wrong = contenders.Step([], lambda: torch.ones(4) * 1.001)
    contenders.check_losses(right, {"same": right}, CPU)
    with pytest.raises(SystemExit, match="wrong"):
        contenders.check_losses(right, {"wrong": wrong}, CPU)
    generator = torch.Generator().manual_seed(0)
    noisy = [contenders.Step([], lambda by=by: by + torch.randn(8, generator=generator)) for by in (0.0, 0.0, 3.0)]
    contenders.check_on_average(noisy[0], {"same": noisy[1]}, CPU)
    with pytest.raises(SystemExit, match="mean loss"):
        contenders.check_on_average(noisy[0], {"wrong": noisy[2]}, CPU)


@pytest.mark.parametrize(("schedule", "microbatches", "bound"), [("auto", 4, 1.0), ("GPipe", 1, 1.0)])
def test_the_bound_of_one_process_is_one(
    schedule: str, microbatches: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    contenders = sibling("contenders", monkeypatch)
    assert case(contenders, monkeypatch, "llama", schedule).bound == pytest.approx(bound)


def test_the_bound_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """W M v / (M v + W - 1) for 1F1B, arXiv:2104.04473."""
    contenders = sibling("contenders", monkeypatch)
    monkeypatch.setattr(contenders, "RANKS", 3)
    assert case(contenders, monkeypatch, "llama", "1F1B").bound == pytest.approx(3 * 3 / (3 + 2))


@pytest.mark.parametrize("backward", [["3B0", "2B0", "1B0", "0B0"], ["3I0", "2I0", "1I0", "0I0", "3W0", "2W0", "1W0", "0W0"]])
def test_sleeping_stages_sleep_as_long_as_their_costs_say(backward: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """I has the gradient of a stage's input alone and W that of its weight alone, and both add up what autograd does."""
    stages = sibling("sleeping_stages", monkeypatch)
    times = stages.alike(4, 0.001)
    workload, costs = stages.workload(3, times), stages.costs(times)
    model, (x, target) = workload.model(), workload.batch(2)
    table = graphpp.Schedule.of([["0F0", "1F0", "2F0", "3F0", *backward]])
    split = [f"layers.{layer}" for layer in (1, 2, 3)]
    example = graphpp.Microbatch((x,), target=target)
    pipe = graphpp.compile(model, workload.loss, example=example, split=split, schedule=table)
    for stage, each in enumerate(costs.stages):
        for phase, item in pipe.programs(stage).programs.items():
            assert item.source.count(", 0.001)") * 0.001 == each.of(Kind(phase.value)), (stage, phase)
    found = pipe.step(x, target=target).loss
    plain = workload.model()
    loss = workload.loss(plain(x), target)
    loss.backward()
    assert torch.equal(found, loss.detach())
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.exhaustive
def test_sleeping_runs_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmarks/sleeping.py"]
    small = ["--ms", "1", "--schedules", "1F1B", "searched", "--steps", "1", "--rounds", "1", "--effort", "0.1", "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    file = tmp_path / "records.json"
    subprocess.run([*command, *small, str(file)], check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, timeout=600)
    named, searched = json.loads(file.read_text())
    assert named["simulated"] == pytest.approx((4 * 3 + 2) * 1e-3)  # rank 1: the first forward, then four of F, I and W
    assert searched["simulated"] <= named["simulated"] < named["with_messages"]
    assert set(named["samples"]) == {"graphpp", "torch"} and set(searched["samples"]) == {"graphpp"}
    assert named["samples"]["graphpp"][0]["seconds"] > named["simulated"]


SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_what_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(sibling(name, monkeypatch).main)


def on_two_ranks(script: str, options: str, file: Path) -> Any:
    """The record that a benchmark writes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = "--dims 16 --layers 2 --length 4 --microbatches 2 --rounds 1 --schedules 1F1B"
    subprocess.run(
        [*command, f"benchmarks/{script}.py", *small.split(), *options.split(), "--json", str(file)],
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    return json.loads(file.read_text())


@pytest.mark.exhaustive
def test_step_time_runs_on_two_ranks(tmp_path: Path) -> None:
    found = on_two_ranks("step_time", "--models gpt2 --others torch plain", tmp_path / "records.json")
    (record,) = found["records"]
    assert record["bound"] == pytest.approx(4 / 3)
    assert {name: len(samples) for name, samples in record["samples"].items()} == {"graphpp eager": 1, "torch": 1, "plain": 1}
    assert 0 < found["means"]["eager"]["torch"] == pytest.approx(record["ratios"]["eager"]["torch"])


@pytest.mark.exhaustive
def test_the_parts_for_one_gpu_are_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/one_gpu.py", "--rehearse", "--out", str(tmp_path), "--parts"]
    parts = ["device", "ranks", "numbers", "gpu", "graphs"]  # speed2, speed4 and lost run the same programs
    found = subprocess.run([*command, *parts], cwd=ROOT, capture_output=True, text=True, check=True, timeout=900).stdout
    assert [f"==== {part}: exit 0" in found for part in parts] == [True] * 5, found
    record = json.loads((tmp_path / "ranks.json").read_text())["records"][0]
    assert record["ranks"] == 2 and set(record["seconds"]) == {"graphpp", "graphpp, eager", "torch, compiled", "torch, eager"}


@pytest.mark.exhaustive
def test_memory_runs_on_two_ranks(tmp_path: Path) -> None:
    (record,) = on_two_ranks("memory", "--models llama", tmp_path / "records.json")
    highest = {name: max(each) for name, each in record["peaks"].items()}
    assert 0 < highest["full"] <= highest["0.5"] <= highest["graphpp"] < highest["torch"]
    assert set(record["times"]) == set(highest)


@pytest.mark.exhaustive
def test_gpu_step(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, "benchmarks/gpu_step.py", "--small", "--rounds", "1", "--microbatches", "2"]
    found = subprocess.run(
        [*command, "--variants", "graphs", "looped", "offload", "--compile-backend", "eager", "--json", str(record)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    samples = json.loads(record.read_text())["samples"]
    assert list(samples) == ["graphpp", "graphs", "looped", "offload", "torch", "torch.compile"]
    assert all(taken[0]["seconds"] > 0 for taken in samples.values())
    assert "it / torch.compile" in found.stdout


@pytest.mark.exhaustive
def test_cuda_graphs(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    command = [sys.executable, "benchmarks/cuda_graphs.py", "--tiny", "--backends", "eager", "--rounds", "1", "--json", file]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    subprocess.run(command, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, timeout=600)
    (record,) = json.loads(file.read_text())
    assert {name: len(each["samples"]) for name, each in record["results"].items()} == {"plain": 1, "step": 1, "tasks": 1}
    assert list(record["results"]["tasks"]["states"]) == ["not replayed: only CUDA devices have such graphs"]
