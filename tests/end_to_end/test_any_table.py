"""Tables that nobody would write, in the real runner: what the checker accepts computes the plain loop's numbers.

Random tables are spoiled at random; those that are accepted all the same run, in one process and on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import Microbatch
from graphpp.batch.microbatch import tensors_by_path
from graphpp.capture.trace import capture
from graphpp.parallel.rank_place import RankPlace
from graphpp.passes.lower import LoweringOptions, lower
from graphpp.planner.layers import module_calls
from graphpp.planner.resolve_split import resolve
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.program import PipelineProgram
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.schedule import Schedule
from tests.distributed import DEVICE, on_cpu, run_ranks
from tests.exhaustive import further
from tests.schedules.mutations import MUTATIONS, accepted
from tests.schedules.tables import legal_rows

Grads = dict[str, Tensor | None]


class Net(nn.Module):
    """Seven layers, the first's output read again by the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x * first


def batch(microbatch: int) -> Microbatch:
    generator = torch.Generator().manual_seed(microbatch)
    x, target = (torch.randn(2, 4, generator=generator).to(DEVICE) for _ in range(2))
    return Microbatch((x,), {}, target)


def programs(stages: int) -> PipelineProgram:
    net = Net().to(DEVICE)
    joint = capture(net, F.mse_loss, batch(0), DEVICE, training=True).joint
    split = [f"layers.{stage}" for stage in range(1, stages)]
    starts = resolve(split, module_calls(joint), None, [name for name, _ in net.named_modules()])
    return lower(joint, starts, options=LoweringOptions(split_backward=True, recompute_ahead=True))


def run(program: PipelineProgram, schedule: Schedule, place: RankPlace) -> Grads:
    """The gradients that this rank is left with."""
    net, count = Net().to(DEVICE), schedule.microbatches
    runner = GraphPPRunner(program, schedule, ModelState(net), place)
    runner.step([tensors_by_path(batch(m)) for m in range(count)], [torch.tensor(1 / count, device=DEVICE)] * count)
    local = {fqn for index in runner.stages for fqn in program.stages[index].parameters}
    assert len(runner.losses()) == count
    return on_cpu({fqn: parameter.grad for fqn, parameter in net.named_parameters() if fqn in local})


def plain_loop(microbatches: int) -> Grads:
    net = Net().to(DEVICE)
    for m in range(microbatches):
        part = batch(m)
        (F.mse_loss(net(*part.args), part.target) / microbatches).backward()
    return on_cpu({fqn: parameter.grad for fqn, parameter in net.named_parameters()})


def accepted_tables(ranks: int, wanted: int) -> list[tuple[str, Schedule]]:
    """Spoiled tables that the checker accepts, with the mutation's name; with sends and receives."""
    random, found = Random(ranks), list[tuple[str, Schedule]]()
    while len(found) < wanted:
        name = random.choice(sorted(MUTATIONS))
        rows, stages, microbatches = legal_rows(random, ranks)
        before = [list(row) for row in rows]
        MUTATIONS[name](random, rows)
        if rows != before and accepted(rows, stages, microbatches):
            schedule = Schedule.of(rows, name=name, stages=stages, microbatches=microbatches)
            found.append((name, schedule if schedule.has_communication else add_send_recv(schedule)))
    return found


def wrong(found: Grads, microbatches: int) -> list[str]:
    expected = plain_loop(microbatches)
    return [fqn for fqn, grad in found.items() if grad is None or not torch.equal(grad, expected[fqn])]  # type: ignore[arg-type]


def test_in_one_process() -> None:
    tables = accepted_tables(1, 60)
    made = {stages: programs(stages) for stages in {table.stages for _, table in tables}}
    for name, table in tables:
        found = run(made[table.stages], table, RankPlace(DEVICE, None))
        assert len(found) == 14
        assert wrong(found, table.microbatches) == [], f"{name}\n{table}"
    assert len({name for name, _ in tables}) >= 5


def on_rank(rank: int, tables: Sequence[Schedule]) -> list[Grads]:
    made = {stages: programs(stages) for stages in {table.stages for table in tables}}
    return [run(made[table.stages], table, RankPlace(DEVICE, dist.group.WORLD)) for table in tables]


@pytest.mark.nccl
@pytest.mark.parametrize(("ranks", "count"), [(2, 60), *further((2, 200), (4, 60))])
def test_on_several_ranks(ranks: int, count: int) -> None:
    tables = accepted_tables(ranks, count)
    parts = run_ranks(on_rank, ranks, [table for _, table in tables])
    for (name, table), *grads in zip(tables, *parts, strict=True):
        found = {fqn: grad for part in grads for fqn, grad in part.items()}
        assert len(found) == 14
        assert wrong(found, table.microbatches) == [], f"{name}\n{table}"
    assert len({name for name, _ in tables}) >= 8


def placements(ranks: int, count: int) -> list[dict[int, int]]:
    """Placements of five stages: neighbours on one rank, unlike numbers of stages, a rank without any; then random ones."""
    random = Random(ranks)
    return [
        {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}, {stage: 0 for stage in range(5)},
        *({stage: random.randrange(ranks) for stage in range(5)} for _ in range(count)),
    ]  # fmt: skip


def trained_on_rank(rank: int, homes: Sequence[dict[int, int]], folder: Path) -> list[tuple[float, float, Grads, list[float]]]:
    """For each placement the loss and the evaluated loss, this rank's gradients, and losses after a checkpoint is read."""
    found = []
    inputs, targets = (torch.cat(each) for each in zip(*((batch(m).args[0], batch(m).target) for m in range(4)), strict=True))
    for number, home in enumerate(homes):
        ranks, costs = dist.get_world_size(), graphpp.Costs.unit(5)
        table = graphpp.schedule_auto(costs, ranks=ranks, microbatches=4, placement=home, effort=0)
        net = Net().to(DEVICE)
        split = "auto" if number % 2 else [f"layers.{stage}" for stage in range(1, 5)]
        pipe = graphpp.compile(net, F.mse_loss, example=batch(0), split=split, schedule=table)
        evaluated = float(pipe.eval(inputs, target=targets).loss)
        loss = float(pipe.step(inputs, target=targets).loss)
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        grads = on_cpu({name: each.grad for name, each in net.named_parameters() if name in state})
        checkpoint = pipe.checkpoint()
        checkpoint.save(folder / str(number))
        for each in pipe.state_dict().values():
            each.zero_()
        checkpoint.load(folder / str(number))
        same = float(all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items()))
        found.append((loss, evaluated, grads, [same, float(pipe.eval(inputs, target=targets).loss)]))
    return found


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), *further((2, 6), (4, 6))])
def test_any_placement_trains_evaluates_and_is_saved(ranks: int, count: int, tmp_path: Path) -> None:
    homes = placements(ranks, count)
    losses = [F.mse_loss(Net()(*batch(m).args), batch(m).target) / 4 for m in range(4)]  # type: ignore[arg-type]
    loss = float((losses[0] + losses[1] + losses[2] + losses[3]).detach())
    for home, *parts in zip(homes, *run_ranks(trained_on_rank, ranks, homes, tmp_path), strict=True):
        found = {fqn: grad for part in parts for fqn, grad in part[2].items()}
        assert len(found) == 14 and wrong(found, 4) == [], home
        for own, evaluated, _, (same, again) in parts:
            assert (own, evaluated, same, again) == (loss, loss, 1.0, loss), home
