"""Measure how much of the experts' all-to-all hides under computation, within a program and where two are interleaved.

    torchrun --nproc-per-node 2 benchmarks/overlap.py [--networks 0 4:1 10:1] [--layers 4] [--microbatches 8]

A mixture of experts with one expert on each rank, trained by combined 1F1B without a pipeline (F0; then each B with the next
F; last B), each rank on its own rows. Four contenders run the operations of the same table, in turn:

    sequence       a program for each F and each B, one after the other, each in the order of the capture
    scheduled      the same programs as graphpp runs them: each hides its own collectives under its own operations
    concatenated   one program for each pair, the forward's operations and then the backward's
    woven          one program for each pair, interleaved as OVERLAP_F_B runs it

A network is `latency in ms:gigabytes per second`: gloo's all-to-all, completed no sooner than on such a link, without
occupying a processor (network.py). `0` is gloo as it is, over loopback: its threads compete with the ranks for
processors, so hiding them gains less than the hidden share suggests.

collectives: the network's time (gloo as it is: until the values had arrived), ms in a step; blocked: the part of that time
during which a rank waited; late: further waiting, because the other rank had not issued its collective yet; hidden: 1 - blocked
/ collectives; allowed: the share that no order of each program's operations could exceed, by the costs with which they were
ordered. The costs are a roofline with this machine's rates of a matrix product and of a copy, times one factor so that a
step's operations take the time that they take in `sequence`, and the network's figures (of gloo as it is: the median of a few
transfers). Losses and gradients of all contenders must be bit-equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from harness import RANK, RANKS, Contender, Sample, alternate, median_ratio, medians, over_ranks, start
from network import emulated, transfers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import graphpp
from graphpp.passes.graph.op_costs import Cost, OpCosts
from graphpp.passes.overlap.stream_timing import GraphTiming, estimate_order
from graphpp.passes.overlap.weave import WovenGraph, concatenate
from graphpp.runtime.program import Phase

sys.path.append(str(Path(__file__).parents[1]))
from tests.internals import last_lowered
from tests.moe import MoE

SHAPE = "sequence", "scheduled", "concatenated", "woven"
PAIRS = SHAPE[2:]


@dataclass(frozen=True)
class Case:
    """One network: seconds and bytes per second; zeros are gloo as it is."""

    latency: float
    bandwidth: float

    @classmethod
    def of(cls, text: str) -> Case:
        latency, _, bandwidth = text.partition(":")
        return cls(float(latency) / 1e3, float(bandwidth or 0) * 1e9)

    def __str__(self) -> str:
        return f"{1e3 * self.latency:g} ms, {self.bandwidth / 1e9:g} GB/s" if self.latency else "gloo as it is"


@dataclass
class Run:
    """A contender: its step, its parameters, and its pipeline."""

    step: Callable[[], Tensor]
    model: MoE
    pipe: graphpp.Pipeline

    def forget_gradients(self) -> None:
        self.model.zero_grad()


def main() -> None:
    option = options()
    device = start()
    if RANKS == 1:
        dist.init_process_group("gloo")
    own = [dist.new_group([rank]) for rank in range(RANKS)][RANK]
    records = [record(Case.of(text), option, own, device) for text in option.networks]
    if RANK == 0:
        Console(width=170).print(table(records))
        if option.json:
            Path(option.json).write_text(json.dumps(records, indent=1))
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["0", "4:1", "10:1"])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=512, help="rows of a microbatch on each rank")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------- contenders


def combined(microbatches: int, overlap: bool) -> graphpp.Schedule:
    """F0; then B_i with F_{i+1}, or one after the other; last B."""
    pairs = [f"0F{index + 1};0B{index}" for index in range(microbatches - 1)]
    middle = [f"({pair})OVERLAP_F_B" for pair in pairs] if overlap else [each for pair in pairs for each in pair.split(";")]
    return graphpp.Schedule.parse(" ".join(["r0 0F0", *middle, f"0B{microbatches - 1}"]))


def concatenated(parts: Sequence[Any], cost: Cost) -> WovenGraph:
    """Stands in for `weave`: part after part in one program."""
    graph = concatenate(parts)
    facts = GraphTiming(graph, cost)
    given = estimate_order(facts, facts.nodes)
    return WovenGraph(tuple(parts), graph, given, given)


def contender(name: str, option: argparse.Namespace, group: dist.ProcessGroup, own: Any, costs: OpCosts) -> Run:
    model = MoE(group, option.dim, option.layers, option.hidden)
    generator = torch.Generator().manual_seed(10 + RANK)
    x = torch.randn(option.rows * option.microbatches, option.dim, generator=generator)
    y = torch.randint(4, (len(x),), generator=generator)
    example = graphpp.Microbatch((x[: option.rows],), target=y[: option.rows])
    plan = combined(option.microbatches, name in PAIRS)
    given = patch("graphpp.compiler.overlap.reordered", lambda graph, cost: None)
    with (
        patch("graphpp.compiler.overlap.weave", concatenated) if name == "concatenated" else nullcontext(),
        given if name in ("sequence", "concatenated") else nullcontext(),
    ):
        pipe = graphpp.compile(
            model, F.cross_entropy, example=example, schedule=plan, parallel=graphpp.Parallel(op_costs=costs), mesh=own
        )
        pipe.step(x, target=y)
    return Run(lambda: pipe.step(x, target=y).losses, model, pipe)


def simulated(pipe: graphpp.Pipeline, costs: Cost) -> tuple[float, float, float]:
    """Of a step by the costs, in seconds: operations, collectives, and the part of the collectives that could hide."""
    lowered = last_lowered(pipe)
    sums = 0.0, 0.0, 0.0
    for action in filter(None, lowered.schedule.table[0]):
        parts = [lowered.programs[0].stages[leaf.stage].programs[Phase(leaf.kind.value)] for leaf in action.leaves]
        facts = GraphTiming(concatenate([lowered.sources.of(part) for part in parts]), costs)
        collectives = sum(facts.cost[node] for node in facts.started)
        compute = sum(facts.cost.values()) - collectives
        least = max(compute, collectives, *facts.tail.values())
        sums = sums[0] + compute, sums[1] + collectives, sums[2] + compute + collectives - least
    return sums


# --------------------------------------------------------------------------------------------------------- measurement


def rates(case: Case, option: argparse.Namespace) -> OpCosts:
    """This machine's rates, the same on all ranks, and the network's figures."""
    left, right = torch.randn(option.rows, option.dim), torch.randn(option.dim, option.hidden)
    flops = 2 * option.rows * option.dim * option.hidden / quickest(lambda: left @ right)
    memory = 2 * left.nbytes / quickest(left.clone)
    latency, link = case.latency, case.bandwidth or 1e12
    if not case.latency:
        out = torch.empty_like(left)
        latency = quickest(lambda: dist.all_to_all_single(out, left))
    found = [statistics.median(values) for values in zip(*over_ranks([flops, memory, latency]), strict=True)]
    return OpCosts(flops=found[0], memory=found[1], launch=3e-6, latency=found[2], link=link)


def fitted(costs: OpCosts, run: Run) -> OpCosts:
    """The same costs with all operations scaled by one factor, so that a step's operations take their measured time."""
    taken = []
    for _ in range(4):
        transfers()
        began = time.perf_counter()
        run.step()
        taken.append(time.perf_counter() - began - sum(each.blocked + each.late for each in transfers()))
    factor = statistics.median(taken[1:]) / simulated(run.pipe, costs)[0]
    factor = statistics.median(value for (value,) in over_ranks([factor]))
    return replace(costs, flops=costs.flops / factor, memory=costs.memory / factor, launch=costs.launch * factor)


def quickest(run: Callable[[], object], times: int = 20) -> float:
    """The median of several runs, seconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def record(case: Case, option: argparse.Namespace, own: Any, device: torch.device) -> dict[str, Any]:
    """Check that the losses agree, then time all contenders in turn."""
    group = emulated(case.latency, case.bandwidth)
    costs = rates(case, option)
    runs = {"sequence": contender("sequence", option, group, own, costs)}
    costs = fitted(costs, runs["sequence"])
    runs |= {name: contender(name, option, group, own, costs) for name in SHAPE[1:]}
    allowed = {name: possible / whole for name, run in runs.items() for _, whole, possible in [simulated(run.pipe, costs)]}
    for run in runs.values():
        run.forget_gradients()
    losses = {name: run.step() for name, run in runs.items()}
    if not all(torch.equal(each, losses["sequence"]) for each in losses.values()):
        raise SystemExit(f"{case}: the losses differ: {losses}")
    gradients = [[p.grad for p in run.model.parameters()] for run in runs.values()]
    if not all(torch.equal(one, other) for each in gradients[1:] for one, other in zip(gradients[0], each, strict=True)):
        raise SystemExit(f"{case}: the gradients differ")
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in SHAPE}
    contenders = {name: Contender(watched(run, seen[name]), run.forget_gradients) for name, run in runs.items()}
    alternate(contenders, 1, device)
    for each in seen.values():
        each.clear()
    samples = alternate(contenders, option.rounds, device)
    return {
        "network": str(case),
        "ranks": RANKS,
        "sizes": {name: vars(option)[name] for name in ("dim", "hidden", "layers", "rows", "microbatches")},
        "costs": asdict(costs),
        "samples": {name: [asdict(sample) for sample in taken] for name, taken in samples.items()},
        "collective": {name: [statistics.median(values) for values in zip(*each, strict=True)] for name, each in seen.items()},
        "allowed": allowed,
    }


def watched(run: Run, seen: list[tuple[float, ...]]) -> Callable[[], object]:
    """A step that also records its collectives' seconds, the seconds it blocked for them, and for the other rank."""

    def step() -> None:
        transfers()
        run.step()
        made = transfers()
        seen.append(tuple(sum(getattr(each, figure) for each in made) for figure in ("seconds", "blocked", "late")))

    return step


def table(records: list[dict[str, Any]]) -> Table:
    """Medians; one line per network and contender."""
    sizes = ", ".join(f"{name} {value}" for name, value in records[0]["sizes"].items())
    shown = Table(title=f"{records[0]['ranks']} ranks, {sizes}", title_justify="left")
    columns = ("step ms", "sequence / it", "concat. / it", "collectives", "blocked", "late", "hidden", "allowed", "of allowed")
    for column in ("network", "contender", *columns):
        shown.add_column(column, justify="left" if column in ("network", "contender") else "right")
    for row in records:
        for name in SHAPE:
            shown.add_row(*line(row, name))
    return shown


def line(row: dict[str, Any], name: str) -> list[str]:
    """One contender of one record as cells."""
    samples = {each: [Sample(**sample) for sample in taken] for each, taken in row["samples"].items()}
    whole, blocked, late = row["collective"][name]
    hidden, possible = 1 - blocked / whole, row["allowed"][name]
    return [
        row["network"] if name == SHAPE[0] else "",
        name,
        f"{1e3 * medians(samples[name]).seconds:.0f}",
        *(f"{median_ratio(samples[other], samples[name]):.3f}" for other in ("sequence", "concatenated")),
        f"{1e3 * whole:.0f}",
        f"{1e3 * blocked:.0f}",
        f"{1e3 * late:.0f}",
        *(f"{100 * share:.0f} %" for share in (hidden, possible, hidden / possible)),
    ]


if __name__ == "__main__":
    main()
