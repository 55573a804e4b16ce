"""The plan that graphpp recommends for a published training, beside the layout that its authors ran.

    python benchmarks/recommended.py [PART OF A NAME ...]

For each run: the tokens per second and GPU as published; those predicted for the authors' layout as their system runs it
(`published.py`), and as graphpp's own runtime would; and those of the best plan of a search with equal model, machines, batch
and length. Nothing runs on a GPU. Runs have no column of published speed for the best plan: nobody has trained by it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from published import Case, cases, compared
from published_models import costs
from published_runs import Run, read_runs
from rich.console import Console
from rich.table import Table

import graphpp
from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import predict
from graphpp.cluster_planner.plans.request import PlanRequest

USUAL = (
    "Llama 3 8B, 8 H100", "Llama 2 13B, 128 A100", "MPT 30B, 32 H100", "GPT 1.5B, 8 A100, ZB-2p, 24", "GPT 145.6B, 1536 A100",
    "GPT 177B, 2304 H100", "Llama 3 405B, 16384 H100, 8192", "Mixtral 8x22B, 128 H100, Megatron with folding",
    "Qwen3 235B-A22B, 256 H100, tp 2", "DeepSeek-V3, 2048 H800",
)  # fmt: skip


def own_rate(run: Run, case: Case) -> float:
    """Tokens per second and GPU of the authors' layout in graphpp's own runtime."""
    it, like = run.settings, case.usual
    usual = Deployment(sequence=like.sequence, compiled=like.compiled, overlapped=("backward",))
    known = costs(run.architecture, it.length, case.float8, attention=it.attention, dropout=it.dropout)
    shape = MeshShape(**case.setting.shape.sizes(), folded=case.setting.shape.folded)  # ranks along cp have copies
    request = PlanRequest(known, case.machines, it.batch, it.length, "bfloat16", usual)
    found = predict(request, replace(case.setting, shape=shape))
    return 0.0 if found is None else it.batch * it.length / found.seconds.total / case.machines.gpus


def row(run: Run) -> tuple[str, ...]:
    it, found = run.settings, cases(run)
    known = costs(run.architecture, it.length, found[0].float8, attention=it.attention, dropout=it.dropout)
    backend = "inductor" if any(case.usual.compiled for case in found) else "eager"
    plans = graphpp.plan(known, machines=found[0].machines, batch=it.batch, backend=backend)
    best, own = plans.best, max(own_rate(run, case) for case in found)
    rate = best.tokens_per_second / found[0].machines.gpus
    figures = (run.tokens or 0.0, compared(run).rate, own, rate)
    gain = f"{rate / own - 1:+.0%}" if own else ""  # graphpp has no such layout
    return run.name, *(f"{each:,.0f}" for each in figures), gain, str(found[0].setting), str(best.setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=USUAL, help="parts of the names of runs; the first one of each part")
    option = parser.parse_args()
    table = Table("run", "published", "predicted", "in graphpp", "best plan", "gain", "authors' layout", "best plan's layout")
    runs = [run for run in read_runs() if run.cannot is None]
    for part in option.names:
        run = next((each for each in runs if part in each.name), None)
        if run is None:
            raise SystemExit(f"names: no run has {part!r} in its name")
        table.add_row(*row(run))
        Console(stderr=True).print(run.name)
    Console(width=300).print(table)


if __name__ == "__main__":
    main()
