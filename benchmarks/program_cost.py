"""Compare generated programs with autograd, without pipeline, schedule or messages.

    python benchmarks/program_cost.py [--dims 64 256 512] [--profile]

One process, one thread, one stage, one microbatch: the forward and backward programs of the whole model and loss
against `loss(model(x)).backward()` of the eager module, in turn; both leave fresh gradients. CPU milliseconds
(medians), so that a busy machine counts little; page faults; calls into torch per microbatch, by kind. `--profile`
prints torch.profiler's self CPU time by operator of both, side by side.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Contender, Sample, alternate, median_ratio, medians
from models import llama_small, loss, new_llama
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import graphpp
from graphpp.capture.trace import capture
from graphpp.passes.lower import LoweringOptions, lower
from graphpp.runtime.program import Buffer, Constant, Gradient, Input, Parameter, Phase, Saved, Seed, StageProgram

VIEWS = {"view", "reshape", "t", "transpose_int", "expand", "slice_Tensor", "split_Tensor", "permute", "unsqueeze",
         "squeeze", "alias", "detach", "_unsafe_view", "select_int", "as_strided"}  # fmt: skip


def main() -> None:
    option = options()
    torch.set_num_threads(1)
    console = Console(width=150)
    shown = Table(title=f"{option.rows * option.length} tokens, {option.layers} layers: CPU ms", title_justify="left")
    for column in ("dim", "eager", "graphpp", "eager/graphpp", "F", "B", "faults eager", "graphpp"):
        shown.add_column(column, justify="right")
    for column in ("calls F", "calls B", "views", "getitems"):
        shown.add_column(column, justify="right")
    for dim in option.dims:
        eager, program, stage = contenders(dim, option)
        samples = in_turn([eager, program.both, program.forward], option.rounds)
        shown.add_row(str(dim), *figures(samples), *map(str, calls(stage)))
        if option.profile:
            console.print(profiles(dim, eager, program.both))
    console.print(shown)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


class Programs:
    """The programs of the one stage, fed by role as the runtime feeds them."""

    def __init__(self, stage: StageProgram, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.phases = {phase: stage.programs[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)}
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fixed = {Parameter(k): v.detach() for k, v in state.items()} | {Buffer(k): v for k, v in state.items()}
        self.known: dict[Any, Any] = {**fixed, **{Input(path): tensor for path, tensor in batch.items()}}
        self.known |= {Constant(name): value for name, value in stage.constants.items()} | {Seed(): torch.ones(())}
        if stage.hoisted is not None:  # runs once per step, so it is no part of a microbatch's cost
            made = stage.hoisted.run([self.known[role] for role in stage.hoisted.inputs])
            self.known |= dict(zip(stage.hoisted.outputs, made, strict=True))

    def forward(self) -> list[Any]:
        """Run the forward and return its results with their roles."""
        return self._run(Phase.FORWARD, {})

    def both(self) -> list[Any]:
        """Run forward and backward and return the gradients."""
        made = self._run(Phase.FORWARD, {})
        kept = {role: value for role, value in made if isinstance(role, Saved)}
        del made
        return [value for role, value in self._run(Phase.BACKWARD, kept) if isinstance(role, Gradient)]

    def _run(self, phase: Phase, kept: dict[Any, Any]) -> list[Any]:
        item = self.phases[phase]
        boxed = [kept.pop(role) if role in kept else self.known[role] for role in item.inputs]
        with torch.no_grad():
            return list(zip(item.outputs, item.run(boxed), strict=True))


def contenders(dim: int, option: argparse.Namespace) -> tuple[Callable[[], object], Programs, StageProgram]:
    """The eager step, the programs, and the stage. Raises SystemExit where their gradients differ."""
    model = new_llama(llama_small(dim, option.layers))
    rows = torch.randint(256, (option.rows, option.length), generator=torch.Generator().manual_seed(1))
    example = graphpp.Microbatch((rows,), target=rows)
    joint = capture(model, loss, example, torch.device("cpu")).joint
    stage = lower(joint, [0], options=LoweringOptions(hoist_per_step=True)).stages[0]
    program = Programs(stage, model, {"args[0]": rows, "target": rows})

    def eager() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        loss(model(rows), rows).backward()

    eager()
    gradients = dict(zip(stage.gradients, program.both(), strict=True))
    wrong = [fqn for fqn, p in model.named_parameters() if not torch.allclose(gradients[fqn], p.grad, rtol=1e-4)]
    if wrong:
        raise SystemExit(f"gradients differ: {wrong[:3]}")
    return eager, program, stage


def in_turn(steps: Sequence[Callable[[], object]], rounds: int) -> list[list[Sample]]:
    """Samples of each step in each round, after two rounds to warm up."""
    contenders = {str(index): Contender(step) for index, step in enumerate(steps)}
    samples = alternate(contenders, rounds + 2, torch.device("cpu"))
    return [taken[2:] for taken in samples.values()]


def figures(samples: list[list[Sample]]) -> list[str]:
    eager, both, forward = map(medians, samples)
    millis = [1e3 * sample.cpu for sample in (eager, both, forward)]
    ratio = median_ratio(samples[0], samples[1], "cpu")
    columns = [f"{value:.2f}" for value in (millis[0], millis[1], ratio, millis[2], millis[1] - millis[2])]
    return [*columns, f"{eager.faults:.0f}", f"{both.faults:.0f}"]


def calls(stage: StageProgram) -> list[int]:
    """The numbers of operations in the forward and in the backward, and of views and of tuple items in both."""
    counts = [operators(stage.programs[phase].source) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    both = counts[0] + counts[1]
    views = sum(count for name, count in both.items() if name in VIEWS)
    return [*(sum(count.values()) - count["getitem"] for count in counts), views, both["getitem"]]


def operators(source: str) -> Counter[str]:
    """The number of calls of each operator in a program; `getitem` for an item of a tuple."""
    found: Counter[str] = Counter()
    for line in source.partition("def run")[2].splitlines():
        called = re.match(r"\s+\w+ = _aten_(\w+)\(", line)
        if called:
            found[called[1].removesuffix("_default")] += 1
        elif re.match(r"\s+\w+ = \w+\[\d+\]", line):
            found["getitem"] += 1
    return found


def profiles(dim: int, eager: Callable[[], object], program: Callable[[], object], repeats: int = 5) -> Table:
    """Self CPU time per operator of both, ms per microbatch, the largest differences first."""
    sides = [by_operator(step, repeats) for step in (eager, program)]
    none = (0.0, 0.0)
    gaps = {name: abs(sides[1].get(name, none)[0] - sides[0].get(name, none)[0]) for side in sides for name in side}
    names = sorted(gaps, key=gaps.__getitem__, reverse=True)
    shown = Table(title=f"dim {dim}: self CPU ms (calls) per microbatch, under the profiler", title_justify="left")
    for column in ("operator", "eager", "graphpp"):
        shown.add_column(column, justify="left" if column == "operator" else "right")
    for name in names[:24]:
        shown.add_row(name, *(f"{ms:.3f} ({count:.0f})" for ms, count in (side.get(name, none) for side in sides)))
    totals = [(sum(ms for ms, _ in side.values()), sum(count for _, count in side.values())) for side in sides]
    shown.add_row("all", *(f"{ms:.3f} ({count:.0f})" for ms, count in totals))
    return shown


def by_operator(step: Callable[[], object], repeats: int) -> dict[str, tuple[float, float]]:
    """Operator -> (self CPU ms, calls) per run."""
    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(repeats):
            step()
    return {e.key: (e.self_cpu_time_total / 1e3 / repeats, e.count / repeats) for e in seen.key_averages()}


if __name__ == "__main__":
    main()
