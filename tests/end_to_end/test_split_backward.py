"""I and W in place of B, and values computed again in place of saved ones, change no bit, on any model, in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpp
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import further
from tests.fuzz.harness import shuffled
from tests.models import MODELS, cuts
from tests.special_models import SPECIAL
from tests.training import Counting, capturing, differences, trained

MICROBATCHES = 4
RSQRTS = 9  # in a forward of the 4-layer Llama: two a layer and the last norm; what they make is small, so saved by default


def split_of(name: str) -> Any:
    return cuts(name, 4) if name in MODELS else 2


def stages_of(name: str) -> int:
    return 4 if name in MODELS else 2


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("name", [*SPECIAL, *further("llama", "hf_gpt2", "hf_vit", "sequential")])
def test_halves_and_recomputation_change_no_bit(name: str) -> None:
    options = {"split": split_of(name), "schedule": shuffled(stages_of(name), MICROBATCHES, 5)}
    whole = trained(1, name, split=options["split"], schedule="1F1B", microbatches=MICROBATCHES)
    assert differences(trained(1, name, **options), whole) == []
    again = graphpp.Recompute(weight_grad=True)
    assert differences(trained(1, name, **options, memory=again), whole) == []


@pytest.mark.parametrize(
    ("pairs", "recompute"), [({(0, 1), (1, 3)}, None), *further((frozenset(), "full"), ({(0, 1), (1, 3)}, "full"))]
)
def test_a_schedule_says_which_microbatches_recompute(pairs: Any, recompute: str | None) -> None:
    table = replace(shuffled(4, MICROBATCHES, 2), recomputed=frozenset(pairs))
    split = cuts("llama", 4)
    whole = trained(1, "llama", split=split, schedule="1F1B", microbatches=MICROBATCHES)
    assert differences(trained(1, "llama", split=split, schedule=table, memory=recompute), whole) == []
    assert runs_of("aten.rsqrt", table, recompute) == RSQRTS * MICROBATCHES + 2 * len(pairs)  # one layer a stage


def runs(table: Schedule | str, recompute: Any, **options: Any) -> Counter[str]:
    """How often each operator runs in a step of the 4-layer Llama in 4 stages."""
    case = MODELS["llama"]()
    pipe = graphpp.compile(
        case.model, case.loss, split=cuts("llama", 4), schedule=table, memory=recompute, **options
    )
    call = {"target": case.batch.target, **case.batch.kwargs}
    with capturing("llama"):
        pipe.step(*case.batch.args, **call)
    with Counting() as counting:
        pipe.step(*case.batch.args, **call)
    return counting.calls


def runs_of(operator: str, table: Schedule | str, recompute: Any, **options: Any) -> int:
    return runs(table, recompute, **options)[operator]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("schedule", ["1F1B", shuffled(4, MICROBATCHES, 0), *further(shuffled(4, MICROBATCHES, 1))])
def test_a_block_runs_forward_twice_however_many_linears_it_has(schedule: Any) -> None:
    options = {"microbatches": MICROBATCHES} if schedule == "1F1B" else {}
    once, again = (runs(schedule, recompute, **options) for recompute in (None, "full"))
    assert once["aten.rsqrt"] < again["aten.rsqrt"] <= 2 * once["aten.rsqrt"]
    assert once["aten.silu"] == again["aten.silu"]  # its input is saved anyway, so it is made again by default, too
    forward = 4 * 7 * MICROBATCHES  # q, k, v, o, gate, up, down in each of the four layers
    assert again["aten.mm"] - once["aten.mm"] <= forward


def test_only_the_layers_named_are_recomputed() -> None:
    table = shuffled(4, MICROBATCHES, 0)
    assert runs_of("aten.rsqrt", table, ["layers.1"]) == (RSQRTS + 2) * MICROBATCHES
    assert runs_of("aten.silu", table, lambda node: False) == 4 * MICROBATCHES
    assert runs_of("aten.silu", table, lambda node: "silu" in str(node.target)) == 8 * MICROBATCHES


def test_recomputation_saves_fewer_bytes_and_the_plan_says_so() -> None:
    case = MODELS["llama"]()
    example = graphpp.Microbatch(*case.batch.microbatches(MICROBATCHES)[0])
    with capturing("llama"):
        plain, lean = (
            graphpp.compile(case.model, case.loss, example=example, split=4, memory=recompute).plan
            for recompute in (None, "full")
        )
    for few, many in zip(lean.stages[:-1], plain.stages[:-1], strict=True):
        assert 4 * few.saved_bytes < many.saved_bytes


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_frozen_stages_under_a_split_backward(frozen: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    batch, target = torch.randn(8, 6), torch.randn(8, 6)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    for index in range(4):
        (loss(model(batch[2 * index :][:2]), target[2 * index :][:2]) / 4).backward()
    expected = {fqn: None if p.grad is None else p.grad.clone() for fqn, p in model.named_parameters()}
    model.zero_grad()
    pipe = graphpp.compile(model, loss, split=["1", "2", "3"], schedule=shuffled(4, 4, 3))
    pipe.step(batch, target=target)
    for fqn, parameter in model.named_parameters():
        grad = expected[fqn]
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_what_recompute_takes() -> None:
    case = MODELS["llama"]()
    for wrong in ("all", 3, [1], 0, 0.0, -0.5, 1.1, float("nan"), True):
        with pytest.raises(graphpp.GraphPPError, match="memory"):
            graphpp.compile(case.model, case.loss, memory=wrong)  # type: ignore[arg-type]
    with pytest.raises(graphpp.GraphPPError, match=r"layers\.9"):
        runs_of("aten.silu", "1F1B", ["layers.9"], microbatches=2)
    with pytest.raises(graphpp.ScheduleError, match="recomputes stage 7 at microbatch 0"):
        runs_of("aten.silu", replace(shuffled(4, 4, 0), recomputed=frozenset({(7, 0)})), None)


@pytest.mark.parametrize("pairs", [None, frozenset(), frozenset({(0, 1), (3, 0), (3, 2)})])
def test_what_is_recomputed_stands_in_the_text(pairs: Any, tmp_path: Path) -> None:
    table = replace(shuffled(4, MICROBATCHES, 0), recomputed=pairs)
    assert Schedule.parse(str(table)) == table
    table.save(tmp_path / "table.csv")
    assert Schedule.load(tmp_path / "table.csv") == table
    assert ("recompute" in str(table)) == (pairs is not None)


@pytest.mark.exhaustive
def test_verify_knows_halves_and_recomputation() -> None:
    case = MODELS["llama"]()
    example = graphpp.Microbatch(*case.batch.microbatches(MICROBATCHES)[0])
    table = replace(shuffled(4, 2, 4), recomputed=frozenset({(1, 0)}))
    with capturing("llama"):
        found = graphpp.verify(case.model, case.loss, example, split=4, schedule=table, ranks=1)
    assert found.ok, str(found)
    with capturing("llama"):
        found = graphpp.verify(case.model, case.loss, example, split=4, schedule=shuffled(4, 2, 4), ranks=1, memory="full")
    assert found.ok, str(found)
