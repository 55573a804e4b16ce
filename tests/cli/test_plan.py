"""`graphpp plan`: plans for machines that are not here, their document and their file."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import graphpp
from graphpp.cli.plan import read_machines
from graphpp.devices import A100, Link, Machines
from tests.cli.running import document, refusal, run, write

CODE = """
    import torch
    from torch import nn

    import graphpp

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def build():
        model = nn.Sequential(nn.Embedding(16, 32), *(Layer() for _ in range(4)), nn.Linear(32, 16))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        loss = lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        return model, loss, graphpp.Microbatch((tokens,), target=tokens)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "model_to_plan.py", CODE)) + ":build"


def test_plans_are_printed_with_the_best_in_full(model: str) -> None:
    found = run("plan", model, "--machines", "2xH100", "--batch", "8")
    assert found.exit_code == 0
    assert "best" in found.stdout and "tokens/s, MFU" in found.stdout and "memory" in found.stdout


def test_the_document_has_the_plans_and_the_file_the_best(model: str, tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    found = document("plan", model, "--machines", "2xH100", "--batch", "8", "--pp", "2", "--save", str(file))
    best = graphpp.TrainingPlan.from_json(file)
    assert found["plans"][0]["setting"]["shape"]["pp"] == 2
    assert len(found["plans"]) > 1 and found["considered"] >= len(found["plans"])
    assert best.reason == "" and best.setting.shape.pp == 2 and best.batch == 8


def test_two_plans_stand_side_by_side_with_their_differences(model: str, tmp_path: Path) -> None:
    asked = "plan", model, "--machines", "2xH100", "--batch", "8", "--pp", "2", "--rows", "1,2", "--schedules", "1F1B"
    file, best = tmp_path / "plans.json", tmp_path / "best.json"
    file.write_text(run(*asked, "--json", "--save", str(best)).stdout)
    plans = graphpp.TrainingPlans.from_json(file).plans
    found = document("compare", str(best), f"{file}:{len(plans)}")
    numbers = {(each["name"], each["unit"]): each for each in found["numbers"]}
    step, last = numbers["step", "seconds"], plans[-1]
    assert (step["first"], step["second"]) == (plans[0].step_seconds, last.step_seconds)
    assert step["difference"] == last.step_seconds - plans[0].step_seconds > 0
    kinds = [numbers[kind, "bytes"] for kind in ("weights", "optimizer", "sent along pp")]
    assert [each["second"] for each in kinds] == [last.memory["weights"], last.memory["optimizer"], last.sent["pp"]]
    text = run("compare", f"{file}:2", f"{file}:2").stdout
    assert "equal" in text and "differs" not in text and "+" not in text
    assert f"the file has plans 1 to {len(plans)}" in refusal("compare", str(file), f"{file}:99")


def test_a_layout_of_ones_own_stands_beside_the_best(model: str, tmp_path: Path) -> None:
    asked = "plan", model, "--machines", "2xH100", "--batch", "8", "--schedules", "1F1B", "--pp", "2"
    words = "--like", "--pipeline-model-parallel-size 2 --micro-batch-size 4 --recompute-granularity full"
    file, page = tmp_path / "plans.json", tmp_path / "plans.html"
    file.write_text(run(*asked, *words, "--json", "--html", str(page)).stdout)
    found = json.loads(file.read_text())["yours"]
    setting = found["plan"]["setting"]
    assert (setting["rows"], setting["microbatches"], setting["recompute"]) == (4, 2, "full")
    assert found["comparison"] == document("compare", str(file), f"{file}:yours") and "yours: pp 2" in page.read_text()
    assert f"<h1>Plans of {model}, " in page.read_text()
    alone = run(*asked[:6], "--no-search", "--like", "pp 2, 1F1B, 2 rows")
    assert alone.exit_code == 0 and "yours: pp 2, 2 stages, 1F1B, 4 microbatches of 2 rows" in alone.stdout
    assert "take other sizes or machines" in refusal(*asked, "--like", "pp 8")


def test_several_machines_and_batches_make_a_table(model: str) -> None:
    asked = "plan", model, "--machines", "2xH100, 3xH100", "--batch", "12,24", "--work", "200", "--schedules", "1F1B,auto"
    money = "--tokens", "1e12", "--price", "2.5"
    text = run(*asked, *money).stdout
    assert text.count("3xH100_SXM") == 2 and "tokens/s" in text and "dollars" in text
    rows = document(*asked, *money)["rows"]
    assert [(each["machines"], each["batch"]) for each in rows] == [
        (f"{gpus}xH100_SXM", batch) for gpus in (2, 3) for batch in (12, 24)
    ]
    for each in rows:
        plan = graphpp.TrainingPlan.from_json(json.dumps(each["plan"]))
        assert each["tokens_per_second"] == plan.tokens_per_second
        assert each["days"] == pytest.approx(1e12 / plan.tokens_per_second / 86_400)
        assert each["dollars"] == pytest.approx(each["days"] * 24 * plan.setting.shape.ranks * 2.5)
    nothing = document(*asked, "--cap", "1KiB", code=1)["rows"]
    assert all(each["plan"] is None and "no plan fits" in each["message"] for each in nothing)


@pytest.mark.exhaustive
def test_each_length_is_captured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    captured, module = list[object](), import_module("graphpp.cluster_planner.costs.capture_costs")
    plain = module.capture_costs
    monkeypatch.setattr(module, "capture_costs", lambda *given, **options: captured.append(given) or plain(*given, **options))
    code = "import transformers as t\ndef build(): return t.GPT2LMHeadModel(t.GPT2Config(n_layer=2, n_embd=96))"
    build = f"{write(tmp_path / 'gpt2_of_lengths.py', code)}:build"
    lengths = "--length", "16,32", "--work", "300", "--pp", "1"
    rows = document("plan", build, "--machines", "1xH100,2xH100", "--batch", "4", *lengths)["rows"]
    assert len(captured) == 2 and [each["length"] for each in rows] == [16, 16, 32, 32]
    assert [each["plan"]["tokens"] for each in rows] == [16, 16, 32, 32]


def test_failures_time_and_money_stand_below_the_best_plan(model: str) -> None:
    few = "--work", "200", "--schedules", "1F1B,auto", "--rows", "1"
    asked = "plan", model, "--machines", "2xH100", "--batch", "8", *few, "--tokens", "1e12", "--price", "2"
    failing = "--mtbf", "50000", "--checkpoint", "30", "--restart", "600"
    plain, found = document(*asked)["training"], document(*asked, *failing)["training"]
    assert found["days"] == pytest.approx(plain["days"] / found["goodput"]) and found["hours_between_failures"] == 25_000
    line = run(*asked, *failing).stdout.rstrip().splitlines()[-1]
    assert line.startswith("goodput 99.") and "steps between saves" in line and "dollars" in line
    assert "training" not in document(*asked[:-4])


def test_unlike_machines_have_caps_and_prices_of_their_own(model: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"device": "A100", "gpus": 2, "per_machine": 2}')
    machines = f"2xH100@500W + {tmp_path / 'mine.json'}"
    asked = "plan", model, "--machines", machines, "--batch", "8", "--work", "200", "--schedules", "1F1B,auto", "--rows", "1"
    found = document(*asked, "--cap", "8GiB,4GiB", "--tokens", "1e12", "--price", "2,1")
    best = graphpp.TrainingPlans.from_json(json.dumps(found)).best
    assert found["asked"]["machines"] == "2xH100_SXM@500W + 2xA100" and found["asked"]["memory cap"].endswith("A100 4.0 GiB")
    assert set(best.caps) <= {2**33, 2**32} and len(best.devices) == best.setting.shape.pp
    assert found["training"]["dollars"] == pytest.approx(found["training"]["days"] * 24 * (2 * 2 + 2 * 1))
    row = document(*asked[:3], f"{machines},2xA100", *asked[4:])["rows"]
    assert [each["machines"] for each in row] == ["2xH100_SXM@500W + 2xA100", "2xA100"]
    assert "--price: take one number, or one for each of 2 groups" in refusal(*asked, "--tokens", "1e12", "--price", "1,2,3")


@pytest.mark.exhaustive
def test_options_of_the_search_reach_it(model: str) -> None:
    asked = "plan", model, "--machines", "2xH100", "--batch", "8", "--rows", "2", "--schedules", "auto,1F1B"
    plain, other = document(*asked, "--pp", "2"), document(*asked, "--pp", "2", "--recompute", "full", "--optimizer", "sgd")
    assert {each["setting"]["recompute"] for each in plain["plans"]} == {None, "selective", "full"}
    assert {each["setting"]["recompute"] for each in other["plans"]} == {"full"}
    assert plain["plans"][0]["memory"]["optimizer"] > 0 == other["plans"][0]["memory"].get("optimizer", 0)
    shared = document(*asked, "--tp", "2", "--tensor-plan", "*.up=colwise,*.down=rowwise")
    assert all(each["setting"]["shape"]["tp"] == 2 for each in shared["plans"])


def test_no_plan_that_fits_is_an_answer(model: str) -> None:
    asked = "plan", model, "--machines", "2xH100", "--batch", "8", "--cap", "1KiB"
    assert "no plan fits; the closest" in run(*asked).stdout
    assert document(*asked, code=1)["plans"] == []


OWN = {
    "gpus": 4,
    "per_machine": 2,
    "between": {"latency": 1e-5, "bandwidth": 1e9},
    "device": {
        "name": "own", "flops": {"bfloat16": 2e14, "float32": 5e13}, "memory_bandwidth": 1e12, "memory": 2**35,
        "host": {"latency": 1e-5, "bandwidth": 3e10}, "efficiency": {"product": {"points": [[1e8, 0.1], [1e12, 0.5]]}},
    },
}  # fmt: skip


def test_machines_of_ones_own_are_read_from_a_file(model: str, tmp_path: Path) -> None:
    file = write(tmp_path / "own.json", json.dumps(OWN))
    found = document("plan", model, "--machines", str(file), "--batch", "8", "--schedules", "auto,1F1B", "--no-offload")
    assert found["plans"][0]["machines"] == "4xown"
    assert found["cap"] == round(0.9 * 2**35)
    named = write(tmp_path / "named.json", json.dumps({"device": "A100", "gpus": 72, "per_machine": 72}))
    assert read_machines(str(named)) == Machines(A100, 72, 72)
    assert read_machines(str(file)).device.host == Link(1e-5, 3e10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "machines.gpus: take a positive integer"),
        ({"gpu": 4}, "machines: take an object with device, gpus, per_machine"),
        ({"device": "Toaster"}, "machines.device: 'Toaster' is no known device: take A100, "),
        ({"device": {"name": "own"}}, "machines.device: missing flops, memory_bandwidth, memory"),
        ({"between": {"latency": "low", "bandwidth": 1e9}}, "machines.between.latency: take float, got 'low'"),
        ({"between": {"latency": -1.0, "bandwidth": 1e9}}, "machines.between.latency: take a number from 0, got -1.0"),
        ({"device": OWN["device"] | {"host": {"latency": 1}}}, "machines.device.host: missing bandwidth"),
        ({"device": OWN["device"] | {"torch_type": "gpu"}}, "machines.device.torch_type: take 'cuda' or 'cpu' or 'xpu' or "),
        ({"device": OWN["device"] | {"flops": {"bf16": 1e14}}}, "machines.device.flops: take a mapping of dtype names to "),
        ({"device": OWN["device"] | {"flops": {"bf16": 1e14}}}, "with names among float64, float32, tf32, bfloat16, float16, "),
        ({"gpus": 12, "per_machine": 0}, "machines.per_machine: take a positive integer up to 2**20, got 0"),
    ],
)
def test_wrong_entries_of_machines_are_named(model: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "own.json", json.dumps(OWN | changes))
    refused = refusal("plan", model, "--machines", str(file), "--batch", "8")
    assert message in refused and f"--machines {file}: " in refused


def test_random_tokens_need_a_length(tmp_path: Path) -> None:
    code = "import transformers\ndef build(): return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))"
    build = f"{write(tmp_path / 'gpt2_to_plan.py', code)}:build"
    asked = "plan", build, "--machines", "2xH100", "--batch", "8"
    assert "--length: give the tokens of a row" in refusal(*asked)
    assert "5000 tokens are more than the 1024 positions" in refusal(*asked, "--length", "5000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machines", "2xToaster", "--batch", "8"], "devices are"),
        (["--machines", "2xH100", "--batch", "0"], "--batch: take a positive number, or several with commas, got '0'"),
        (["--machines", "2xH100", "--batch", "8,16", "--save", "x"], "--save: it is for one search: give one of --machines"),
        (["--machines", "2xH100", "--batch", "8", "--price", "2"], "--price: say for how many tokens: --tokens 1e12"),
        (["--machines", "2xH100 + 2xA100", "--batch", "8", "--cap", "1GB,2GB,3GB"], "a number of bytes for each of 2 groups"),
        (["--machines", "2xH100", "--batch", "8", "--tokens", "9", "--price", "much"], "--price: take dollars of a GPU hour"),
        (["--machines", "2xH100", "--batch", "8", "--mtbf", "9"], "--mtbf, --checkpoint, --restart: give all three"),
        (["--machines", "2xH100", "--batch", "8", "--pp", "two"], "--pp: take a positive number"),
        (["--machines", "2xH100", "--batch", "8", "--dtype", "int8"], "--dtype: take the name of a floating dtype"),
        (["--machines", "2xH100", "--batch", "8", "--tensor-plan", "*.up"], "--tensor-plan: take pattern=style"),
        (["--machines", "2xH100", "--batch", "8", "--optimizer", "lion"], "memory.optimizer: take"),
        (["--machines", "2xH100", "--batch", "8", "--work", "1"], "give more work"),
        (["--machines", "2xH100", "--batch", "8", "--schedules", "1F2B"], "schedules: take a list of names"),
        (["--machines", "2xH100", "--batch", "8", "--save", "/nowhere/at/all.json"], "all.json cannot be written: "),
    ],
)
def test_wrong_options_are_named(model: str, options: list[str], message: str) -> None:
    assert message in refusal("plan", model, *options)
