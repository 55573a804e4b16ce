"""Values that depend on parameters alone are computed once per step, are never saved, and change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import graphpp
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.joint.gradient_sums import split_tied_gradients
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.hoist_per_step import find_step_invariants, hoist_per_step
from graphpp.passes.stage.split_weight_grad import split_weight_grad
from graphpp.runtime import program as p
from tests import internals
from tests.fuzz.harness import shuffled
from tests.models import MODELS
from tests.passes.graphs import assigned, captured, starts
from tests.training import Counting

D, ROWS = 4, 12


class Net(nn.Module):
    """A weight with a norm, a weight that two stages read in another dtype, a mask, a table, a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = weight_norm(nn.Linear(D, D))
        self.norm = nn.BatchNorm1d(D)
        self.both = nn.Parameter(torch.randn(D, D))
        self.register_buffer("table", torch.linspace(0, 1, D))
        self.second = nn.Linear(D, D)
        self.log_scale = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(D, D).tril()
        turned = self.both.exp()
        x = self.norm(self.first(x)) @ (turned * mask)
        return self.second(F.dropout(x, 0.5) * self.log_scale.exp()) @ turned + self.table.cos()


def loss(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def staged_of(net: nn.Module, *calls: str) -> StagedGraphs:
    joint = captured(net, torch.randn(6, D))
    joint = find_step_invariants(split_tied_gradients(assigned(joint, *starts(joint, *calls))))
    return split_weight_grad(joint, hoist_per_step(joint, cut_stages(joint, 1 + len(calls))))


def test_a_compiler_is_left_the_cheap_values() -> None:
    """The weight with a norm is computed by a reduction; exponentials, casts, masks and tables are fused into their readers."""
    joint = find_step_invariants(assigned(captured(Net(), torch.randn(6, D)), 0), cheap=False)
    marked = [node for node in joint.graph.nodes if node.meta.get("step_invariant")]
    assert marked and all(any("first" in call for call in node.meta["calls"]) for node in marked)


def made(staged: StagedGraphs, stage: int) -> list[str]:
    return [str(node.target) for node in staged.hoisted[stage].graph.nodes if node.op == "call_function"]


def test_what_is_made_once() -> None:
    staged = staged_of(Net(), "second")
    assert "aten._weight_norm_interface.default" in made(staged, 0)
    assert "aten.tril.default" in made(staged, 0)
    assert made(staged, 0).count("aten.exp.default") == 1  # of `log_scale`
    assert {"aten.cos.default", "aten.t.default"} <= set(made(staged, 1))
    read = {role for slot in staged.graphs.values() for role in slot.inputs}
    assert p.Parameter("first.parametrizations.weight.original1") not in {
        role for (phase, _), slot in staged.graphs.items() if phase is p.Phase.FORWARD for role in slot.inputs
    }
    assert p.StepInvariant in map(type, read)


def test_nothing_that_is_made_once_is_saved_or_sent() -> None:
    staged = staged_of(Net(), "second")
    names = {role.name for slot in staged.hoisted.values() for role in slot.outputs}  # type: ignore[union-attr]
    moved = {r.name for slot in staged.graphs.values() for r in slot.outputs if isinstance(r, p.Saved | p.Sent)}
    assert names and not names & moved


def test_what_stays() -> None:
    """Not hoisted: a parameter's value read in two stages, a written buffer's value, random numbers, results."""
    staged = staged_of(Net(), "second")
    forwards = [[str(node.target) for node in staged.graphs[p.Phase.FORWARD, stage].graph.nodes] for stage in range(2)]
    assert forwards[0].count("aten.exp.default") == 1  # `turned`, which is sent to the other stage
    assert p.Parameter("both") not in staged.graphs[p.Phase.FORWARD, 1].inputs
    assert p.Parameter("both") not in staged.hoisted[1].inputs
    written = [role for role in staged.hoisted[0].inputs if isinstance(role, p.Buffer)]
    assert written == []


@pytest.mark.parametrize("schedule", ["1F1B", shuffled(2, 3, 1)])
def test_no_bit_changes_while_parameters_do(schedule: Any) -> None:
    """Several optimizer steps with an evaluation between them."""
    ours, theirs = Net(), Net()
    for net in (ours, theirs):
        net.register_forward_pre_hook(lambda module, args: None)
    options = {"microbatches": 3} if schedule == "1F1B" else {}
    numbers = []
    for net, recompute in ((ours, None), (theirs, "full")):
        pipe = graphpp.compile(net, loss, split=["second"], schedule=schedule, memory=recompute, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for seed in range(2):
            torch.manual_seed(seed)
            x = torch.randn(ROWS, D)
            losses = pipe.step(x, target=torch.zeros(ROWS)).losses
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(losses)
    assert all(torch.equal(a, b) for a, b in zip(numbers[:2], numbers[2:], strict=True))
    assert not torch.equal(numbers[0], numbers[1])
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_casts_of_weights_run_once_per_step_and_are_dropped() -> None:
    case = MODELS["sequential"]()
    counts = []
    with torch.autocast("cpu", torch.bfloat16):
        for microbatches in (2, 4):
            pipe = graphpp.compile(case.model, case.loss, split=2, schedule="1F1B", microbatches=microbatches)
            pipe.step(*case.batch.args, target=case.batch.target)
            with Counting() as counting:
                pipe.step(*case.batch.args, target=case.batch.target)
            counts.append(counting.calls["aten._to_copy"])
            stages = [pipe.programs(stage) for stage in (0, 1)]
            weights = {tuple(value.shape) for value in case.model.parameters() if value.dim() == 2}
            assert not [m for stage in stages for m in stage.saved if m.dtype == torch.bfloat16 and m.shape in weights]
            assert not any(wiring.bound for stage in internals.last_runner(pipe).stages.values() for wiring in stage._wirings())
    linears = 6
    per_microbatch = (counts[1] - counts[0]) / 2
    assert counts[0] - 2 * per_microbatch == 2 * linears  # a weight and a bias each, for any number of microbatches
