"""OVERLAP_F_B with experts spread over two ranks: what is woven, that nothing changes but the order, and who is refused.

Each rank has a pipeline of its own (a group of one) with several stages; the experts' collectives go over both ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphpp
from graphpp.errors import MismatchError, ScheduleError
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.internals import last_lowered, woven_programs
from tests.moe import MoE, batch
from tests.training import capturing_once

THREE = ["layers.1", "layers.3"]  # stages 0, 1, 2
TWO = ["layers.2"]


def row(text: str) -> str:
    """A row in which parentheses stand for overlaps."""
    return text.replace(")", ")OVERLAP_F_B")


TABLES = {
    "one stage": (None, row("0F0 (0F1;0B0) (0F2;0B1) 0B2")),
    "two stages": (TWO, row("0F0 1F0 (0F1;1B0) (1F1;0B0) (0F2;1B1) (1F2;0B1) 1B2 0B2")),
    "split": (TWO, row("0F0 1F0 (0F1;1I0) (1W0;0B0) (1F1;0F2) 1I1 (1F2;0I1;1W1) 1I2 (0W1;1W2) 0I2 0W2")),
    "three stages": (THREE, row("0F0 1F0 2F0 0F1 (1F1;2B0) (2F1;1B0) (0F2;2B1) (1F2;0B0) (2F2;1B1) 0B1 2B2 1B2 0B2")),
}
SEQUENCE = {"two stages": "1F1B", "split": "ZBVZeroBubble"}  # a table without overlaps over the same stages


def interpreted(module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    return module


def own_group(rank: int) -> dist.ProcessGroup:
    """A group for this rank's pipeline alone."""
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    return groups[rank]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def compiled(rank: int, split: Sequence[str] | None, table: str, **options: Any) -> tuple[MoE, graphpp.Pipeline]:
    """A model and its pipeline; `table` is a name of a schedule, or the rank's row."""
    model = MoE(world())
    schedule = graphpp.Schedule.parse(f"r0 {table}") if " " in table else table
    return model, graphpp.compile(
        model, F.cross_entropy, split=split, schedule=schedule, microbatches=3, mesh=own_group(rank), **options
    )


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {fqn: p.grad.clone() for fqn, p in model.named_parameters() if p.grad is not None}


def eager(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain loop over the microbatches."""
    model, (x, y), losses = MoE(world()), batch(rank), []
    for rows, targets in zip(x.chunk(3), y.chunk(3), strict=True):
        loss = F.cross_entropy(model(rows), targets)
        (loss / 3).backward()
        losses.append(loss.detach())
    return torch.stack(losses), grads(model)


class Seen(NamedTuple):
    """Of one rank: the results that were unequal, the woven texts by title, and the texts of stage 0 alone by phase."""

    faults: list[str]
    woven: dict[str, str]
    alone: dict[str, str]


def steps(rank: int, names: Sequence[str], options: dict[str, Any]) -> dict[str, Seen]:
    """A step under each table, and under one without overlaps, compared with the plain loop: bit for bit, unless a backend adds
    gradients within matrix products, which round as the processor does; then the steps are equal among themselves."""
    with capturing_once():
        return compared_steps(rank, names, options)


def compared_steps(rank: int, names: Sequence[str], options: dict[str, Any]) -> dict[str, Seen]:
    losses, expected = eager(rank)
    (x, y), found = batch(rank), {}
    for name in names:
        split, table = TABLES[name]
        faults, alone, first = [], {}, expected
        for schedule in (table, SEQUENCE[name]) if name in SEQUENCE else (table,):
            model, pipe = compiled(rank, split, schedule, **options)
            if not torch.equal(pipe.step(x, target=y).losses, losses):
                faults.append(f"{schedule}: losses")
            made = grads(model)
            far = (fqn for fqn in expected if not torch.allclose(made[fqn], expected[fqn], rtol=1e-5, atol=1e-6))
            faults += [f"{schedule}: {fqn}" for fqn in far]
            first = made if "backend" in options and schedule == table else first
            faults += [f"{schedule}: bits of {fqn}" for fqn in first if not torch.equal(made[fqn], first[fqn])]
            if schedule == table:
                texts = {text.source.partition('"""')[2].partition('"""')[0]: text.source for text in woven_programs(pipe)}
            else:
                alone = {phase.label: item.source for phase, item in last_lowered(pipe).programs[0].stages[0].programs.items()}
        found[name] = Seen(faults, texts, alone)
    return found


def in_flight(text: str) -> dict[str, list[str]]:
    """For each collective in a woven text, the operations on matrices between its start and its wait."""
    pending: dict[str, list[str]] = {}
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, right = line.strip().partition(" = ")
        if "all_to_all_single_default(" in right:
            pending[name] = []
        elif "wait_tensor_default(" in right:
            sent = right.partition("(")[2].partition(")")[0]
            found[sent] = pending.pop(sent)
        elif "mm_default(" in right or "take.matmul(" in right:
            for between in pending.values():
                between.append(name)
    assert not pending
    return found


def test_bit_equal_to_the_pipeline_in_sequence_and_to_the_plain_loop() -> None:
    for seen in run_ranks(steps, 2, list(TABLES), {}):
        assert {name: each.faults for name, each in seen.items()} == {name: [] for name in TABLES}
        assert list(seen["one stage"].woven) == ["stage 0 forward with stage 0 backward"]
        titles = {"stage 0 forward with stage 1 backward", "stage 1 forward with stage 0 backward"}
        assert set(seen["two stages"].woven) == titles
        assert "stage 1 forward with stage 0 input grad with stage 1 weight grad" in seen["split"].woven
        assert check_covered(seen["two stages"].woven) == check_covered(seen["three stages"].woven) == []
        assert_hides_its_own(seen["two stages"].alone["backward"])


def assert_hides_its_own(text: str) -> None:
    """Every exchange of a backward but the first travels while weight gradients are multiplied."""
    hidden = in_flight(text)
    assert len(hidden) == 4
    assert [sent for sent, between in hidden.items() if not between] == list(hidden)[:1]


@pytest.mark.parametrize(
    "options",
    [
        {"memory": graphpp.Memory(recompute="full"), "backend": interpreted},
        *further({"memory": graphpp.Memory(recompute="full")}, {"backend": interpreted}),
    ],
)
def test_with_recomputation_and_regions(options: dict[str, Any]) -> None:
    for seen in run_ranks(steps, 2, ["two stages", "split"], options):
        assert {name: each.faults for name, each in seen.items()} == {"two stages": [], "split": []}
        if "backend" in options:  # recomputed operation by operation, a backward has no memory to run ahead in
            assert_hides_its_own(seen["two stages"].alone["backward"])


def check_covered(woven: dict[str, str]) -> list[str]:
    """Woven programs of which fewer than 70 % of the collectives are in flight while the other part multiplies matrices."""
    faults = []
    for title, source in woven.items():
        hidden = in_flight(source)
        assert len({part_of(name) for name in hidden}) == 2, title
        covered = [sent for sent, between in hidden.items() if {part_of(name) for name in between} - {part_of(sent)}]
        faults += [title] if len(covered) < 0.7 * len(hidden) else []
    return faults


def part_of(name: str) -> str:
    """`b1` of `b1_mm_3`."""
    return name.partition("_")[0]


def fused(rank: int) -> list[str]:
    """Parameters whose gradients are wrong where products are handed out by woven programs; what was not handed out."""
    _, expected = eager(rank)
    split, table = TABLES["split"]
    model, pipe = compiled(rank, split, table, gradients=graphpp.Gradients(fused=True))
    x, y = batch(rank)
    pipe.step(x, target=y)
    made = grads(model)
    making = [each.source for each in woven_programs(pipe) if {part.phase.value for part in each.parts} & {"B", "W"}]
    assert making
    missing = [source.partition("\n")[0] for source in making if "take.matmul(" not in source]
    return missing + [fqn for fqn in expected if not torch.allclose(made[fqn], expected[fqn], rtol=1e-4, atol=1e-6)]


@pytest.mark.exhaustive
def test_woven_programs_hand_out_products() -> None:
    assert run_ranks(fused, 2) == [[], []]


def pipelines_of_two(rank: int) -> tuple[bool, list[str], list[str]]:
    """Ranks 0 and 2, and 1 and 3, have a pipeline each; 0 and 1, and 2 and 3, hold the same stages and share experts.

    So the two ranks of a pipeline know their group of experts under two names. The third microbatch is a smaller one.
    """
    experts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pipeline = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    rows = "0F0 0F1 3F0 (0F2;3B0) 3F1 3B1 (3F2;0B0) (3B2;0B1) 0B2", "1F0 2F0 1F1 2F1 (1F2;2B0) (2F2;1B0) 2B1 1B1 2B2 1B2"
    schedule = graphpp.Schedule.parse("".join(f"r{index} {row(each)}\n" for index, each in enumerate(rows)))
    model, expected, (x, y), losses = MoE(experts), MoE(experts), batch(rank % 2, rows=22), []
    cuts = ["layers.1", "layers.2", "layers.3"]
    pipe = graphpp.compile(model, F.cross_entropy, split=cuts, schedule=schedule, mesh=pipeline)
    found = pipe.step(x, target=y).losses
    for some, targets in zip(x.split(8), y.split(8), strict=True):
        loss = F.cross_entropy(expected(some), targets)
        (loss / 3).backward()
        losses.append(loss.detach())
    known = dict(expected.named_parameters())
    faults = [fqn for fqn, p in pipe.named_parameters() if p.grad is None or not torch.equal(p.grad, known[fqn].grad)]
    assert len(list(pipe.named_parameters())) in (20, 22)
    groups = [text.source.partition("_group_0 = ")[2].partition("\n")[0] for text in woven_programs(pipe)]
    return torch.equal(found, torch.stack(losses)), faults, groups


@pytest.mark.exhaustive
def test_pipelines_over_ranks_whose_experts_are_elsewhere_and_microbatches_of_two_shapes() -> None:
    names = []
    for equal, faults, groups in run_ranks(pipelines_of_two, 4):
        assert equal
        assert faults == []
        names.append(set(groups))
    assert names[0] == names[1] != names[2] == names[3]


def differently(rank: int) -> str:
    """Rank 1 has its forwards and backwards in another order, so that its collectives meet others."""
    table = TABLES["two stages"][1] if rank == 0 else "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1B1 1F2 0B1 1B2 0B2"
    _, pipe = compiled(rank, TWO, table)
    x, y = batch(rank)
    with pytest.raises(MismatchError) as caught:
        pipe.step(x, target=y)
    return str(caught.value)


def test_ranks_whose_collectives_do_not_match_are_refused() -> None:
    for text in run_ranks(differently, 2):
        assert "differs in the collectives of a step, in order: it has " in text


class Counting(nn.Module):
    """A layer with a buffer that each forward writes, after having read it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.mean()
        return torch.tanh(self.linear(x)) * (1 + self.seen)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(), Counting())


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    "text",
    ["0F0 1F0 (0F1;1B0) (1F1;0B0) 1B1 0B1", "(0F0;0F1) 1F0 1F1 1B0 1B1 0B0 0B1", "0F0 0F1 1F0 1F1 1B0 (1B1;0B0) 0B1"],
)
def test_parts_without_collectives_run_one_after_the_other(text: str) -> None:
    x, y, losses = torch.randn(8, 4), torch.randn(8, 4), []
    expected, model = plain(), plain()
    for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = mean_square(expected(rows), targets)
        (loss / 2).backward()
        losses.append(loss.detach())
    pipe = graphpp.compile(model, mean_square, split=["1"], schedule=graphpp.Schedule.parse(f"r0 {row(text)}"))
    assert torch.equal(pipe.step(x, target=y).losses, torch.stack(losses))
    assert woven_programs(pipe) == []
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    assert torch.equal(model[0].seen, expected[0].seen)


@pytest.mark.parametrize("text", ["(0F0;1F0) 1B0 0B0", "0F0 1F0 (1B0;0B0)", "0F0 (1F0;1B0) 0B0"])
def test_parts_that_wait_for_each_other_are_refused(text: str) -> None:
    schedule = graphpp.Schedule.parse(f"r0 {row(text)}")
    with pytest.raises(ScheduleError):
        graphpp.compile(plain(), mean_square, split=["1"], schedule=schedule).step(torch.randn(2, 4), target=torch.randn(2, 4))
