"""`graphpp.plan`: plans for machines that are not here, and pipelines that run by them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from graphpp import TrainingPlan, TrainingPlans
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.errors import GraphPPError, NoPlanError, ScheduleError
from tests.distributed import run_ranks
from tests.exhaustive import further

LAYERS, WIDTH, LENGTH, VOCAB, BATCH = 8, 64, 32, 128, 16


class Layer(nn.Module):
    """A residual feed-forward layer with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TENSOR_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def example(rows: int = 1, device: str = "meta") -> graphpp.Microbatch:
    tokens = torch.zeros(rows, LENGTH, dtype=torch.int64, device=device)
    return graphpp.Microbatch((tokens,), target=tokens)


@cache
def costs(dtype: torch.dtype | None, device_type: str) -> ModelCosts:
    with torch.device("meta"):
        model = Decoder()
    return capture_costs(model, loss, example(), param_dtype=dtype, tensor_plan=TENSOR_PLAN, device_type=device_type)


def plans(machines: str = "8xH100", **options: Any) -> TrainingPlans:
    given: dict[str, Any] = {"batch": BATCH, "work": 4_000, **options}
    known = costs(given.get("param_dtype", torch.bfloat16), "cpu" if str(machines).endswith("CPU") else "cuda")
    return graphpp.plan(known, machines=machines, **given)


def test_the_best_plan_comes_first_and_the_others_have_reasons() -> None:
    found = plans()
    assert all(each.reason for each in found.plans[1:])
    seconds = [each.step_seconds for each in found.plans[1:]]
    assert seconds == sorted(seconds) and found.best.step_seconds <= 1.02 * seconds[0]
    assert len({each.setting for each in found}) == len(found)
    assert all(0 < each.mfu < 1 and 0 <= each.bubble < 1 for each in found)


def test_no_plan_of_the_front_is_beaten_in_time_and_memory() -> None:
    found = plans()
    for each in found:
        beaten = any(
            (other.step_seconds, other.peak) != (each.step_seconds, each.peak)
            and other.step_seconds <= each.step_seconds * (1 - 1e-9)
            and other.peak <= each.peak
            for other in found
        )
        assert not (each.on_front and beaten)
    assert found.front[0].step_seconds == min(each.step_seconds for each in found)
    assert found.front[-1].peak == min(each.peak for each in found)


def test_a_cap_is_kept_and_names_the_closest_plan_where_none_fits() -> None:
    free = plans()
    cap = free.best.peak - 1
    capped = plans(memory_cap=cap)
    assert capped.best.peak <= cap and capped.best.step_seconds >= free.best.step_seconds
    with pytest.raises(NoPlanError, match=r"memory_cap=1,000 bytes: no plan fits; the closest, pp .* takes .* KiB"):
        plans(memory_cap=1_000)


def test_dimensions_and_schedules_can_be_given() -> None:
    found = plans(pp=2, tp=[1, 2], schedules=["1F1B", "ZBVZeroBubble"], rows=2, recompute=["full"], work=30_000)
    assert {each.setting.shape.pp for each in found} == {2}
    assert {each.setting.shape.tp for each in found} == {1, 2}
    assert {each.setting.schedule.name for each in found} == {"1F1B", "ZBVZeroBubble"}
    assert {(each.setting.rows, each.setting.recompute) for each in found} == {(2, "full")}


def test_machines_need_not_be_full() -> None:
    found = plans("60xH100", batch=60, work=2_000, pp=5, schedules=["1F1B"])
    assert all(each.setting.shape.ranks == 60 for each in found) and {each.machines for each in found} == {"60xH100_SXM"}
    own = plans("60xH100", batch=60, work=500, like="pp 5, dp_shard 3, tp 4, 1F1B", search=False).yours
    assert own is not None and own.mesh == {"pp": 5, "dp_shard": 3, "tp": 4}


def test_the_model_on_meta_is_captured_and_not_changed() -> None:
    with torch.device("meta"):
        model = Decoder()
    before = {fqn: id(each) for fqn, each in model.named_parameters()}
    found = graphpp.plan(model, loss, example(), machines="2xA100", batch=4, work=500)
    assert found.best.machines == "2xA100"
    assert before == {fqn: id(each) for fqn, each in model.named_parameters()}


def test_the_page_has_every_plan_and_the_cap() -> None:
    free = plans()
    cap = sorted(each.peak for each in free)[len(free) // 2]
    found = plans(memory_cap=cap)
    text = found.to_html()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [each["seconds"] for each in data["plans"]] == [each.step_seconds for each in found]
    assert [each["fits"] for each in data["plans"]] == [each.peak <= cap for each in found]
    assert data["cap"] == cap and found.plans[-1].reason in text
    assert all(each["timeline"]["makespan"] <= each["seconds"] for each in data["plans"])


def test_the_page_says_what_was_asked() -> None:
    found = plans(tp=[1, 2], recompute=[None, "full"])
    assert found.asked["tp"] == "1, 2" and found.asked["recompute"] == "none, full" and "pp" not in found.asked
    with torch.device("meta"):
        model = Decoder()
    own = graphpp.plan(model, loss, example(), machines="2xA100", batch=4, work=500)
    parameters = sum(each.numel() for each in model.parameters())
    assert own.asked == {"model": "Decoder", "parameters": f"{parameters:,}", **own.asked, "work": "500"}
    page = own.to_html()
    assert "<h1>Plans of Decoder on 2xA100" in page and f"torch {torch.__version__}</dd>" in page
    assert page == TrainingPlans.from_json(own.to_json()).to_html()


def test_a_plan_draws_its_step() -> None:
    for plan in plans(batch=16).plans[:12]:
        step = plan.timeline()
        assert step.schedule.stages == plan.setting.stages
        if step.schedule.microbatches == plan.setting.microbatches and plan.setting.offload is None:
            assert step.makespan + plan.seconds.optimizer == pytest.approx(plan.step_seconds)
    with pytest.raises(GraphPPError, match=r"plan\.costs: the seconds of its stages are unknown: search again"):
        replace(plans().best, costs=None).timeline()


def test_json_keeps_everything(tmp_path: Path) -> None:
    best = plans(schedules=["MegatronInterleaved", "1F1B"], machines="4xH100", pp=2, batch=32).best
    assert TrainingPlan.from_json(best.to_json()) == best
    file = tmp_path / "plan.json"
    file.write_text(best.to_json())
    assert TrainingPlan.from_json(file) == best


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "plan: take a JSON object"),
        ("{", "plan: Expecting"),
        pytest.param("[" * 200_000, "plan: maximum recursion depth", id="nested"),
        ('{"format": 2}', "take JSON of TrainingPlan.to_json with format 1"),
        ('{"format": 1, "shape": 3}', r"got \['shape'\]"),
        ('{"format": 1}', "plan: missing machines, setting"),
        ('{"plans": []}', "TrainingPlans.from_json reads several plans"),
    ],
)
def test_other_json_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(GraphPPError, match=message):
        TrainingPlan.from_json(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machines": "8xToaster"}, "machines: .*devices are"),
        ({"batch": 0}, "batch: take a positive integer"),
        ({"batch": 3, "machines": "4xH100", "pp": 1, "tp": 1}, "no setting for 4 GPUs and a batch of 3 rows .*pp of .1."),
        ({"schedules": ["1F2B"]}, "schedules: take a list of names"),
        ({"tp": 0}, "tp: take a positive integer"),
        ({"schedules": ["GPipe"]}, "schedules: take a list of names"),
        ({"machines": 8}, 'machines: take "<count>x<device>"'),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        plans(**options)


def test_all_plans_come_back_from_json_and_stand_on_a_page() -> None:
    found = plans()
    again = TrainingPlans.from_json(found.to_json())
    assert again == found and TrainingPlans.from_json(found.best.to_json()).best == found.best
    text = again.to_html()
    assert "8xH100_SXM" in text and all(str(each.setting) in text for each in found)
    with pytest.raises(GraphPPError, match="with one plan or more"):
        TrainingPlans.from_json('{"plans": []}')
    with pytest.raises(GraphPPError, match=r"asked: take an object of names and texts, got \[1\]"):
        TrainingPlans.from_json(json.dumps({**json.loads(found.to_json()), "asked": [1]}))
    with pytest.raises(NoPlanError, match=f"where: it accepts none of {len(found)} plans; the best is pp 4 x dp_shard 2"):
        found.where(lambda each: each.setting.rows == 1000)


def test_an_argument_that_has_no_effect_is_refused() -> None:
    for given, source in (({"example": example()}, "a ModelCosts"), ({"dp_shard": 2}, "a ModelCosts")):
        with pytest.raises(ScheduleError, match=f"{next(iter(given))}: it has no effect beside {source}: leave one of the two"):
            plans(**given)


def _edited(path: str, value: object) -> str:
    """The JSON of a plan with one entry exchanged."""
    document = json.loads(plans().best.to_json())
    *folders, name = path.split(".")
    inside = document
    for each in folders:
        inside = inside[each]
    inside[name] = value
    return json.dumps(document)


@pytest.mark.first_cases(5)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("setting.shape.pp", "1"), ("setting.shape.pp", 0), ("setting.schedule", "1F1B"), ("setting.schedule.name", "1F2B"),
        ("setting.schedule.colour", 3), ("memory", None), ("split", ["layers.1"] * 99), ("peaks", []), ("dtype", "bogus"),
    ],
)  # fmt: skip
def test_json_with_a_wrong_entry_is_refused_by_name(path: str, value: object) -> None:
    with pytest.raises(GraphPPError) as error:
        TrainingPlan.from_json(_edited(path, value))
    assert any(part in str(error.value) for part in path.split("."))


def test_costs_and_plans_are_of_one_dtype() -> None:
    with pytest.raises(ScheduleError, match="param_dtype=None: the costs were captured with param_dtype=bfloat16"):
        graphpp.plan(costs(torch.bfloat16, "cuda"), machines="1xH100", batch=8, param_dtype=None)


@pytest.mark.parametrize("work", [1, 2])
def test_too_little_work_for_any_plan_is_refused_by_name(work: int) -> None:
    with pytest.raises(ScheduleError, match=f"work={work}: of .* settings none could be simulated: give more work"):
        plans(machines="8xH100", work=work)


def test_the_best_plan_of_each_number_of_pipeline_ranks_is_printed_with_its_number() -> None:
    """So that the reader finds why a pipeline lost, or why none did not win."""
    found = plans()
    lines = str(found).splitlines()
    for pp in {each.setting.shape.pp for each in found}:
        number, plan = next((at, each) for at, each in enumerate(found, 1) if each.setting.shape.pp == pp)
        assert any(re.match(rf" *{number}\*? .*pp {pp} ", line) for line in lines), (number, plan)
    numbers = [int(each[1]) for line in lines if (each := re.match(r" *(\d+)\*? +pp ", line))]
    assert numbers == sorted(set(numbers)) and numbers[:12] == list(range(1, 13))
    assert f"and {len(found) - len(numbers)} more in .plans" in str(found)


def trained(rank: int, plan: TrainingPlan) -> dict[str, Any]:
    """A step by a plan; what the compiled pipeline's own plan says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = plan.setting.rows
    pipe = graphpp.compile(Decoder(), loss, example=example(rows, "cpu"), plan=plan, memory=graphpp.Memory(optimizer="adamw"))
    tokens = torch.randint(VOCAB, (rows * plan.setting.microbatches, LENGTH), generator=torch.Generator().manual_seed(0))
    result = pipe.step(tokens, target=tokens)
    made = pipe.plan
    assert made.memory is not None
    return {
        "loss": float(result.loss), "schedule": made.schedule.name, "peaks": [each.peak for each in made.memory.ranks],
        "starts": [stage.modules[0].partition(" .. ")[0] for stage in made.stages[1:]],
        "microbatches": made.schedule.microbatches,
        "sent": max((each.sent for each in made.sharding.ranks), default=0) if made.sharding is not None else 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"pp": 2, "param_dtype": None, "schedules": ["ZBVZeroBubble"], "recompute": ["full"]}),
        *further(
            (4, {"pp": 2, "schedules": ["MegatronInterleaved", "Interleaved1F1B"]}),
            (2, {"pp": 1, "keep": None}),
            (4, {"pp": 2, "keep": 0, "rows": 1, "tp": 1, "schedules": ["ZB1P"], "recompute": ["full"]}),
            (2, {"pp": 2, "param_dtype": None, "schedules": ["1F1B"]}),
            (2, {"pp": 1, "keep": 0, "rows": 2}),
        ),
    ],
)
def test_a_pipeline_runs_by_a_plan_as_it_is(ranks: int, options: dict[str, Any]) -> None:
    searched = {name: each for name, each in options.items() if name != "keep"}
    found = plans(machines=f"{ranks}xCPU", memory_cap=2**33, **searched)
    best = found.where(lambda each: each.setting.keep == options.get("keep", each.setting.keep)).best
    for ran in run_ranks(trained, ranks, best):
        assert ran["loss"] == pytest.approx(torch.tensor(float(VOCAB)).log().item(), rel=0.1)
        assert ran["microbatches"] == best.setting.microbatches
        assert ran["starts"] == list(best.split)
        for real, predicted in zip(ran["peaks"], best.peaks, strict=True):
            # A value that two segments of a stage hold counts twice, which is much in a model as small as this one.
            assert 0.995 * real <= predicted <= 1.06 * real
        assert ran["sent"] == pytest.approx(best.sent["dp_shard"], rel=0.02)


def test_verify_checks_a_step_by_a_plan() -> None:
    best = plans(machines="4xCPU", pp=2, tp=1, memory_cap=2**33, schedules=["ZBVZeroBubble"], recompute=["full"]).best
    assert best.dtype is not None and best.mesh["dp_shard"] == 2  # parameters that verify leaves whole
    tokens = torch.randint(VOCAB, (3, LENGTH))
    given = graphpp.Microbatch((tokens,), target=tokens)
    found = graphpp.verify(Decoder(), loss, given, plan=best)
    assert found.ok, str(found)
    table = found.plan.schedule
    assert (table.name, table.ranks, table.microbatches) == ("ZBVZeroBubble", 2, best.setting.microbatches)
    assert [stage.modules[0].partition(" .. ")[0] for stage in found.plan.stages[1:]] == list(best.split)
    with pytest.raises(GraphPPError, match="ranks: plan= is for 2, got 4"):
        graphpp.verify(Decoder(), loss, given, plan=best, ranks=4)
    with pytest.raises(GraphPPError, match="schedule: plan= decides it"):
        graphpp.verify(Decoder(), loss, given, plan=best, schedule="GPipe")


@pytest.mark.first_cases(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "GPipe"}, "schedule: plan= decides it"),
        ({"split": 2}, "split: plan= decides it"),
        ({"microbatches": 2}, "microbatches.count: plan= decides it"),
        ({"memory": "full"}, "memory.recompute: plan= decides it"),
        ({"parallel": graphpp.Parallel(keep=1)}, "parallel.keep: plan= decides it"),
        ({}, r"plan: it is for 4 ranks \(pp 2 x dp_.*\), and this job has 1"),
        ({"example": example(7, "cpu")}, r"example: its tensors have 7 rows, and plan= has microbatches of \d+"),
    ],
)
def test_options_beside_a_plan_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    best = plans(machines="4xCPU", pp=2, tp=1, memory_cap=2**33).best
    with pytest.raises(GraphPPError, match=message):
        graphpp.compile(Decoder(), loss, plan=best, **options)
    with pytest.raises(GraphPPError, match=r"plan: it has tp: make a mesh of .*give mesh="):
        tensor = plans(machines="4xCPU", tp=2, memory_cap=2**33).best
        graphpp.compile(Decoder(), loss, plan=tensor)
    with pytest.raises(GraphPPError, match=r"plan: take a graphpp\.TrainingPlan"):
        graphpp.compile(Decoder(), loss, plan="best")  # type: ignore[arg-type]
