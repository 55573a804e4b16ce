"""The seconds and bytes of segments: against stages that are lowered, by degrees, and under the search for a cut."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import graphpp
from graphpp.capture.trace import capture
from graphpp.cluster_planner.costs import Deployment, ModelCosts, PricedModel, capture_costs, priced
from graphpp.devices import H100_SXM, Curve, Efficiency, Link, Machines
from graphpp.errors import CaptureError, ScheduleError
from graphpp.options.recompute import Recompute, read_recompute
from graphpp.passes.lower import LoweringOptions, lower
from graphpp.planner import recompute_policy as policy
from graphpp.planner.auto_split import CutSearch
from graphpp.planner.layers import module_calls
from graphpp.runtime.program_costs import costs_of_stage
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import StageCosts
from graphpp.schedules.table.state_bytes import held_bytes
from tests import models
from tests.cluster_planner.costs.test_rows import MODELS
from tests.exhaustive import further

H100 = Machines.read("64xH100")
FLAT = Machines(
    replace(H100_SXM, efficiency=Efficiency(*[Curve(((1.0, 1.0),))] * 6), launch=0.0), 64,
    inside=Link(0.0, 1e9, 1.0), between=Link(0.0, 1e8, 1.0),
)  # fmt: skip


@cache
def _costs(name: str) -> ModelCosts:
    torch.manual_seed(0)
    model, loss, example = MODELS[name](2)
    return capture_costs(model, loss, example, param_dtype=None)


def _seconds(found: PricedModel) -> float:
    return sum(stage.forward + stage.of(Kind.B) for stage in found.segments.costs.stages)


def _exchanged(found: PricedModel, *kinds: Kind) -> list[float]:
    """Seconds of exchanges by segment."""
    return [sum(stage.lines(kind).exchanged for kind in kinds or (Kind.F, Kind.B)) for stage in found.segments.costs.stages]


def _of_experts(found: PricedModel, kind: str) -> int:
    """The sum of one figure of the experts' state."""
    pairs = zip(found.segments.state, found.expert_state, strict=True)
    return sum(getattr(each, kind) for each, expert in pairs if expert)


@pytest.mark.parametrize("recompute", ["selective", *further(None, "full")])
def test_bytes_are_those_of_lowered_stages(recompute: str | None) -> None:
    model, loss, example = MODELS["llama"](2)
    costs = _costs("llama")
    joint = capture(model, loss, example, torch.device("cpu")).joint
    calls = module_calls(joint)
    option = (read_recompute(recompute) if recompute is not None else None) or Recompute()
    region = policy.region_of(option, calls) if recompute is not None else None
    options = LoweringOptions(
        split_backward=True, region_of=region, may_recompute=policy.may_recompute(option),
        recompute_budget=policy.recompute_budget(option, region, "cuda", None),
    )  # fmt: skip
    program = lower(joint, costs.starts, options=options)
    model_on = priced(costs, H100, Deployment(rows=2, recompute=recompute))
    for stage, found in enumerate(model_on.segments.costs.stages):
        real = costs_of_stage(program, stage)
        assert (found.saved_bytes, found.kept_bytes, found.peak_bytes) == (real.saved_bytes, real.kept_bytes, real.peak_bytes)
    assert model_on.forward_bytes == tuple(sum(value.nbytes for value in each.forward) for each in program.boundaries)
    assert model_on.backward_bytes == tuple(sum(value.nbytes for value in each.backward) for each in program.boundaries)


def test_rows_multiply_flops_and_activations_but_no_state() -> None:
    costs = _costs("llama")
    one, four = priced(costs, FLAT), priced(costs, FLAT, Deployment(rows=4))
    assert four.flops == 4 * one.flops > 0
    assert four.segments.state == one.segments.state
    stages = zip(one.segments.costs.stages, four.segments.costs.stages, strict=True)
    constants = {4 * few.saved_bytes - more.saved_bytes for few, more in stages}
    assert constants == {0, 3 * (2 * 16 * 8 * 4), 3 * 4}  # sines and cosines of positions in the layers, a number in the loss
    assert four.forward_bytes == tuple(4 * each for each in one.forward_bytes)


def test_tensor_parallelism_divides_what_its_plan_shards() -> None:
    costs = _costs("llama")
    one, two = priced(costs, FLAT), priced(costs, FLAT, Deployment(tp=2))
    weights = [sum(each.weights for each in found.segments.state) for found in (one, two)]
    norms = sum(each.elements * each.itemsize for each in costs.parameters if not each.sharded)
    assert weights[1] - norms == (weights[0] - norms) / 2
    assert two.flops == one.flops
    assert not any(_exchanged(one))
    assert _exchanged(two, Kind.F)[costs.layers[0]] == pytest.approx(2 * FLAT.all_reduce(16 * 32 * 4, 2))
    assert all(nbytes == 0 for sent in one.sent for nbytes in sent.values())
    assert two.sent[costs.layers[0]] == {"tp": 4 * 16 * 32 * 4, "ep": 0, "cp": 0}, "two sums forward and two backward"
    plain = priced(costs, FLAT, Deployment(tp=2, sequence=False))
    assert plain.forward_bytes == one.forward_bytes == tuple(2 * each for each in two.forward_bytes)


def test_experts_are_divided_and_their_tokens_exchanged() -> None:
    costs = _costs("mixtral")
    one, four = priced(costs, FLAT, Deployment(rows=2)), priced(costs, FLAT, Deployment(rows=2, ep=4))
    weights = 2 * sum(each.elements for each in costs.parameters if each.expert)
    assert (_of_experts(one, "weights"), _of_experts(four, "weights")) == (weights, weights // 4)
    layer = costs.layers[0]
    routed = 2 * 16 * 2 * 32  # rows, tokens, choices, width
    assert _exchanged(four, Kind.F)[layer] == pytest.approx(2 * FLAT.all_to_all(routed * 2, 4))
    assert _exchanged(four, Kind.B)[layer] == pytest.approx(2 * FLAT.all_to_all(routed * 2, 4))
    assert four.segments.costs.stages[layer].saved_bytes == one.segments.costs.stages[layer].saved_bytes


def test_folded_experts_take_no_part_in_tensor_parallelism() -> None:
    costs = _costs("mixtral")
    shared, folded = (priced(costs, FLAT, Deployment(rows=2, tp=2, ep=2, folded=each)) for each in (False, True))
    assert _of_experts(shared, "weights") == _of_experts(folded, "weights")
    assert folded.executed == shared.executed
    layer, routed = costs.layers[0], 2 * 16 * 2 * 32  # rows, tokens, choices, width
    without = priced(costs, FLAT, Deployment(rows=2, tp=2))
    of_experts = 2 * FLAT.all_to_all(routed * 2 / 2, 4)  # of half of the tokens, over tp x ep
    attention = _exchanged(folded, Kind.F)[layer] - of_experts
    assert 0 < attention < _exchanged(without, Kind.F)[layer], "an expert's sum over tp is left out"
    assert folded.sent[layer]["tp"] < shared.sent[layer]["tp"]
    over_context = priced(costs, FLAT, Deployment(rows=2, cp=2, ep=4, folded=True))
    assert _of_experts(over_context, "weights") == _of_experts(folded, "weights") // 2


def test_context_parallelism_divides_activations_and_exchanges_keys() -> None:
    costs = _costs("llama")
    one, two = priced(costs, FLAT), priced(costs, FLAT, Deployment(cp=2))
    assert two.segments.state == one.segments.state
    assert two.forward_bytes == tuple(each // 2 for each in one.forward_bytes)
    forward, backward = (_exchanged(two, kind)[costs.layers[0]] for kind in (Kind.F, Kind.B))
    assert backward == 2 * forward > 0
    with pytest.raises(ScheduleError, match="cp: the model has no fused attention"):
        priced(_costs("convolutions"), FLAT, Deployment(cp=2))


def test_recomputation_takes_time_and_saves_bytes() -> None:
    costs = _costs("llama")
    each = {kind: priced(costs, H100, Deployment(rows=2, recompute=kind)) for kind in (None, 0.7, "full")}
    saved = {kind: sum(stage.saved_bytes for stage in found.segments.costs.stages) for kind, found in each.items()}
    assert saved[None] > saved[0.7] > saved["full"]
    assert saved[0.7] == pytest.approx(0.7 * saved[None], rel=0.01)
    assert _seconds(each[None]) < _seconds(each[0.7]) < _seconds(each["full"])
    assert each["full"].flops == each[None].flops


def test_the_search_for_a_cut_runs_on_priced_segments() -> None:
    costs = _costs("llama")
    found = priced(costs, H100, Deployment(rows=2))
    table = add_send_recv(make_table("1F1B", 2, 2, 4))
    search = CutSearch(found.segments, table, lambda state: held_bytes(state, table.rank_of_stage, 2, 1))
    cut = search.best()
    assert len(cut) == 2 and cut[1] in range(1, len(costs.starts))
    stages, state = found.segments.stages(cut)
    each = found.segments.costs.stages
    assert sum(stage.forward for stage in stages.stages) == pytest.approx(sum(segment.forward for segment in each))
    assert {reader for each in state for reader in each.readers} == {0, 1}


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", 4), (None, 2)])
def test_sums_and_optimizer_are_in_float32_where_the_capture_was_given_a_dtype(dtype: str | None, nbytes: int) -> None:
    costs = replace(_costs("mixtral"), param_dtype=dtype)
    state = [each for each in priced(costs, H100).segments.state if each.weights]
    assert sum(each.weights for each in state) == 2 * costs.elements
    assert sum(each.rows or 0 for each in state) == sum(each.sums for each in state) == nbytes * costs.elements
    assert sum(each.optimizer for each in state) == 2 * nbytes * costs.elements
    narrow = [each for each in priced(costs, H100, Deployment(reduce_dtype="bfloat16")).segments.state if each.weights]
    assert sum(each.sums for each in narrow) == sum(each.sent or 0 for each in narrow) == 2 * costs.elements
    assert [each.optimizer for each in narrow] == [each.optimizer for each in state]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"rows": 0}, "rows"), ({"tp": 1.5}, "tp"), ({"recompute": "some"}, "recompute"), ({"recompute": 2}, "recompute")],
)
def test_refused_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ScheduleError, match=named):
        priced(_costs("llama"), H100, Deployment(**options))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"ep": 2}, "ep: the costs were made without expert_plan="),
        ("convolutions", {"tp": 2}, "tp: the costs were made without tensor_plan="),
        ("llama", {"tp": 4}, "tp: take a divisor of 2, got 4"),  # heads of keys
        ("mixtral", {"ep": 16}, "ep: take a divisor of 8, got 16"),
        ("mixtral", {"ep": 8, "tp": 2, "folded": True}, "ep: take a divisor of 8, got 16"),
        ("mixtral", {"tp": 2, "folded": True, "sequence": False}, "folded: ranks along tp send other tokens"),
    ],
)
def test_degrees_that_a_model_cannot_have_are_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        priced(_costs(name), H100, Deployment(**options))


def test_an_example_without_rows_is_refused() -> None:
    with pytest.raises(CaptureError, match="example"):
        capture_costs(models.hf_llama().model, models.logits_loss, graphpp.Microbatch((torch.zeros(()),), {}, None))


def test_eager_kernels_move_more_bytes_and_wait_for_the_host() -> None:
    costs = _costs("llama")
    fused, eager = (priced(costs, FLAT, Deployment(rows=8, compiled=compiled)) for compiled in (True, False))
    assert _seconds(eager) > _seconds(fused)
    slow_host = replace(FLAT, device=replace(FLAT.device, dispatch=1.0))
    launched = priced(costs, slow_host, Deployment(rows=8, compiled=False)).segments.costs.stages
    assert all(stage.forward == round(stage.forward) for stage in launched), "a second for each operator"
    assert max(stage.forward for stage in launched) >= 10
    assert _seconds(priced(costs, slow_host, Deployment(rows=8))) == _seconds(fused), "the host launches no single kernels"


def test_the_host_launches_each_experts_product_by_itself() -> None:
    costs, slow_host = _costs("mixtral"), replace(FLAT, device=replace(FLAT.device, dispatch=1.0))
    layer, experts = costs.layers[0], costs.expert_ranks
    variant = costs.variants[None]
    products = sum(count for one, count in variant.kinds[variant.kind_of[layer]].operations[0] if one.grouped)
    one, each = (priced(costs, slow_host, Deployment(rows=2, ep=ep, single=True)) for ep in (1, experts))
    saved = one.segments.costs.stages[layer].forward - each.segments.costs.stages[layer].forward
    assert saved == pytest.approx(products * (experts - 1)) and products > 0
    grouped = priced(costs, slow_host, Deployment(rows=2)).segments.costs.stages[layer]
    assert grouped.forward < 1, "the host launches no single kernels"


def test_gradients_in_place_leave_no_shards_of_their_own() -> None:
    usual, in_place = (priced(_costs("llama"), FLAT, Deployment(in_place=each)).segments.state for each in (False, True))
    assert sum(one.row_sums or 0 for one in usual) > 0 == sum(one.row_sums or 0 for one in in_place)
    assert [one.sums for one in usual] == [one.sums for one in in_place]


def test_a_backward_hides_exchanges_under_its_weight_gradients() -> None:
    machines = replace(FLAT, inside=Link(0.0, 1e12, 1.0, contention=0.5))
    each = [priced(_costs("llama"), machines, Deployment(tp=2, overlapped=own)) for own in ((), ("backward",))]
    costs = [found.segments.costs for found in each]
    assert costs[0].hidden == costs[1].hidden == pytest.approx(0.9 * (1 - 0.5)), "half a second is lost per second"
    for plain, hidden in zip(*(found.stages for found in costs), strict=True):
        free = min(plain.lines(Kind.B).exchanged, plain.lines(Kind.W).computed)
        assert plain.backward - hidden.backward == pytest.approx(0.8 * (1 - 0.5) * free)
        assert hidden.in_sequence.backward == pytest.approx(plain.backward)
        assert replace(hidden, backward=plain.backward, overlapped={}) == plain
    assert costs[1].stages[_costs("llama").layers[0]].overlapped[Kind.B] > 0
    slow = replace(FLAT, inside=Link(0.0, 1e12, 1.0, contention=1.5))
    assert priced(_costs("llama"), slow, Deployment(tp=2, overlapped=("backward",))).segments.costs.hidden == 0


def test_a_backward_that_waits_for_the_host_hides_nothing() -> None:
    slow = replace(FLAT, device=replace(FLAT.device, dispatch=1.0))
    each = [Deployment(tp=2, compiled=False, overlapped=own) for own in ((), ("backward",))]
    plain, hidden = ([stage.backward for stage in priced(_costs("llama"), slow, one).segments.costs.stages] for one in each)
    assert plain == hidden


def test_the_pace_of_a_schedule_is_that_of_its_programs() -> None:
    found = priced(_costs("llama"), FLAT, Deployment(tp=2, overlapped=("backward",)))
    stages, alike = found.segments.costs.stages, [Kind.F, Kind.B]
    whole = sum(stage.lines(kind).in_sequence for stage in stages for kind in alike)
    one = StageCosts(
        sum(stage.forward for stage in stages), 0.0, 0.0, sum(stage.backward or 0.0 for stage in stages),
        exchanged={kind: sum(stage.lines(kind).exchanged for stage in stages) for kind in alike},
        overlapped={kind: sum(stage.lines(kind).both for stage in stages) for kind in alike},
    )  # fmt: skip
    pair = replace(found.segments.costs, stages=(one,), sends_forward=(), sends_backward=()).together(
        [(0, kind, False) for kind in alike]
    )
    assert found.paces == pytest.approx(((one.forward + one.of(Kind.B)) / whole, pair / whole))
    assert found.paces[1] < found.paces[0] < 1


def test_overlapped_exchanges_cost_what_the_computations_lose_to_them() -> None:
    tp = 2
    plain, hidden = (
        sum(_exchanged(priced(_costs("llama"), FLAT, Deployment(tp=tp, overlapped=each)))) for each in ((), ("tp",))
    )
    shown = 1 / tp + (1 - 1 / tp) * FLAT.contention(tp)
    assert plain > 0
    assert hidden == pytest.approx(shown * plain)


def test_heads_that_were_joined_with_the_rows_are_divided() -> None:
    """Attention as two products, of which each has one batch dimension of rows times heads."""
    heads = 4

    class Written(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (torch.nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (each(x).unflatten(-1, (heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
            return self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    plan = dict.fromkeys(("query", "key", "value"), "colwise") | {"out": "rowwise"}
    example = graphpp.Microbatch((torch.randn(2, 6, 32),), target=torch.randn(2, 6, 32))
    found = capture_costs(Written(), torch.nn.functional.mse_loss, example, param_dtype=None, tensor_plan=plan)
    assert found.tensor_ranks == heads


def test_model_flops_leave_out_scores_that_are_computed_again_and_recomputation() -> None:
    costs, kinds = _costs("llama"), ("attention", "attention_backward")
    plain, again = (priced(costs, FLAT, Deployment(rows=costs.rows, recompute=each)) for each in (None, "full"))
    variant = costs.variants[None]
    forward, backward = (
        sum(count * sum(term[3] for term in one.flops) for number in variant.kind_of
            for phase in variant.kinds[number].operations[:2] for one, count in phase if one.kind == kind)
        for kind in kinds
    )  # fmt: skip
    assert backward == pytest.approx(2.5 * forward) and forward > 0
    assert plain.executed - plain.flops == pytest.approx(backward - 2 * forward)
    assert again.flops == plain.flops and again.executed > plain.executed + forward
