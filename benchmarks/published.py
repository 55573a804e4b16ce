"""Compare predicted tokens per second and GPU with published measurements, in the published settings.

    python benchmarks/published.py [--group NAME ...] [--only NAME ...]

The runs are those of benchmarks/published/ (`published_runs.py`); without options, the ones of docs/planner/published.md.
Nothing runs on a GPU: each model is captured on the meta device (seconds to a minute), and its published mesh, schedule and
microbatches are priced, as `graphpp.plan(like=, search=False)` does: the published layouts are not searched for. What other
systems have beyond graphpp's runtime is a part of the price: exchanges along `tp` or `ep` that overlap with computations, and
kernels (`published_kernels.py`).
With `--group` (no name: all groups), the tables of `published_summary.py` follow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import mean

from published_kernels import saved_by_fused_kernels, with_fused_loss
from published_models import costs
from published_runs import DEVICES, Fleet, Run, Settings, read_runs
from published_summary import NOISE, choices, error_bars, summary
from rich.console import Console
from rich.table import Table

from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.cluster_planner.plans.training_plan import StepSeconds
from graphpp.devices import A100, H100_SXM, H200, Curve, Machines

KNOWN = {  # by the names of the runs
    "A100": A100, "H100": H100_SXM, "H200": H200,
    "A100 40 GB": replace(A100, name="A100 40 GB", memory_bandwidth=1.555e12, memory=40 * 10**9),
    "H100 96 GB": replace(H100_SXM, name="H100 96 GB", memory_bandwidth=2.4e12, memory=96 * 10**9),  # HBM2e, of torchtitan
    "H800": replace(H100_SXM, name="H800", inside=replace(H100_SXM.inside, bandwidth=200e9)),  # NVLink with 400 GB/s both ways
}  # fmt: skip
# Attention kernels before those of the devices' own curves, forward and backward. FlashAttention 2 on an H100, heads of 128:
# the figures of arXiv 2407.08608, 512 to 16,384 tokens (causal; backward: of full squares, times the ratio of both forwards).
# FlashAttention 1 on an A100: 30 to 50 and 25 to 35 % of the peak (arXiv 2307.08691); on an H100 its multiprocessors times its
# clock make the same kernels 1.52 times as fast.
KERNELS = {
    ("H", "flash 2"): (
        Curve(((3.4e10, 0.193), (6.9e10, 0.263), (1.37e11, 0.301), (2.75e11, 0.323), (5.5e11, 0.337), (1.1e12, 0.339))),
        Curve(((8.6e10, 0.134), (1.7e11, 0.195), (3.4e11, 0.242), (6.9e11, 0.272), (1.4e12, 0.289), (2.75e12, 0.295))),
    ),
    ("A", "flash 1"): (Curve(((1e9, 0.40),)), Curve(((1e9, 0.30),))),
    ("H", "flash 1"): (Curve(((1e9, 0.19),)), Curve(((1e9, 0.144),))),
}
SMALL_STAGES = 16  # of a rank, where a system hides gathers and reductions under the layers of a pipeline of one rank
class ContextShards(MeshShape):
    """A mesh whose ranks along `cp` hold shards too, as in torchtitan, FSDP and Megatron's distributed optimizer: each of them
    shards over all ranks that have one part of the layers. graphpp's ranks along `cp` have copies."""

    @property
    def shards(self) -> int:
        return super().shards * self.cp

    @property
    def shard_stride(self) -> int:
        return self.stride("cp")

    @property
    def copies(self) -> tuple[str, ...]:
        return ("dp_replicate",)

    @property
    def copies_of_experts(self) -> tuple[str, ...]:
        return ("dp_replicate",) if self.folded else ("dp_replicate", "cp")


@dataclass(frozen=True)
class Case:
    """A run with one number of stages a rank, as the planner prices it; `usual`: its kernels and overlapped exchanges."""

    run: Run
    machines: Machines
    setting: PlanSetting
    usual: Deployment

    @property
    def float8(self) -> str | None:
        precision = self.run.settings.precision
        return None if precision == "bfloat16" else precision.removeprefix("float8 ")


def cases(run: Run) -> tuple[Case, ...]:
    """A case for each number of stages a rank that the run may have had, and for each kind of kernels.

    FSDP without a pipeline gathers each layer for each forward and backward (`keep=0`), and hybrid sharding small stages, of
    which two are whole. Small stages also hide the reductions that a system hides under the layers of one rank. Raises
    `ValueError` for a run with `cannot`.
    """
    if run.cannot is not None:
        raise ValueError(f"{run.name}: the planner cannot express {run.cannot}")
    it, shape = run.settings, _shape(run.settings)
    keep = 0 if it.zero == 3 and it.pp == 1 and shape.shards > 1 else None
    stages = it.stages
    if it.pp == 1 and (it.shard or (keep is None and "gradients" in it.overlap)):
        stages, keep = (min(SMALL_STAGES, run.architecture.layers),), 2 if keep == 0 else None
    recompute = None if it.recompute == "none" else it.recompute
    chosen = run.architecture.per_token or None if it.dispatch == "machines" else None
    overlapped = tuple(each for each in it.overlap if each in ("tp", "ep"))
    microbatches = it.batch // (shape.data_ranks * it.rows)
    compiled = {"eager": (False,), "partly": (False, True)}.get(it.kernels, (True,))
    return tuple(
        Case(
            run, _machines(run.machines, it.attention),
            PlanSetting(shape, it.rows, microbatches, _schedule(it.schedule, each), keep, recompute),
            Deployment(
                sequence=it.sequence_parallel is not False, compiled=kind, overlapped=overlapped, chosen=chosen,
                casts=it.casts, reduce_dtype=it.reduce_dtype, in_place=it.zero == 1, single=it.experts == "single",
                sum_order="any",
            ),
        )
        for each in stages
        for kind in compiled
    )  # fmt: skip


def _machines(fleet: Fleet, attention: str) -> Machines:
    device = KNOWN[fleet.device]
    if (key := (fleet.device[0], attention)) in KERNELS:
        on, back = KERNELS[key]
        device = replace(device, efficiency=replace(device.efficiency, attention=on, attention_backward=back))
    device = device if fleet.power is None else device.limited(fleet.power)
    between = device.between if fleet.network is None else replace(device.between, bandwidth=fleet.network / 8 * 1e9)
    return Machines(device, fleet.gpus, fleet.per_machine, between=between)


def _shape(it: Settings) -> MeshShape:
    """Whatever ZeRO shards, the planner's weights are sharded too: between steps, or between layers with `keep=0`. Experts that
    `etp` leaves whole are spread over `cp` and `tp` too. Raises `ValueError` for another `etp`, which cannot be priced."""
    shard, inside = 1 if it.zero == 0 else (it.shard or it.dp), it.cp * it.tp
    folded = it.etp == 1 and inside > 1
    if it.etp not in (None, 1, it.tp) or (folded and it.ep % inside):
        raise ValueError(f"ep {it.ep}, etp {it.etp}: the planner has experts that tp divides, or whole ones over cp x tp")
    ep = it.ep // inside if folded else it.ep
    sharded = max(1, shard // ep)
    kind = ContextShards if shard == it.dp and it.zero else MeshShape
    return kind(it.pp, it.dp // (sharded * ep), sharded, ep, it.cp, it.tp, folded)


def _schedule(name: str, stages: int) -> ScheduleChoice:
    if name == "interleaved":
        name = "Interleaved1F1B" if stages > 1 else "1F1B"
    return ScheduleChoice("auto" if name == "loop" else name, stages)


@dataclass(frozen=True)
class Compared:
    """A run beside the prediction of one of its cases; `seconds`: of its step, by part."""

    run: Run
    seconds: StepSeconds
    peak: int

    @property
    def rate(self) -> float:
        """Predicted tokens per second and GPU."""
        return self.run.settings.batch * self.run.settings.length / self.seconds.total / self.run.machines.gpus

    @property
    def error(self) -> float:
        return self.rate / (self.run.tokens or self.rate) - 1

    @property
    def per_peak(self) -> float:
        """Utilisation of one token per second."""
        it = self.run
        return it.architecture.flops(it.settings.length, "causal") / DEVICES[it.machines.device]

    @property
    def nbytes(self) -> float | None:
        """Predicted bytes over the published ones; None if none were published."""
        published = self.run.result.memory
        return published and self.peak / (published * (2**30 if self.run.result.unit == "GiB" else 1e9))

    def row(self) -> tuple[str, ...]:
        it, total = self.run, self.seconds.total
        shares = [self.seconds.collectives, self.seconds.bubble, self.seconds.gradients]
        return (
            it.name, f"{it.tokens:,.0f}" if it.tokens else "", f"{self.rate:,.0f}", f"{self.error:+.0%}" if it.tokens else "",
            *(f"{share / total:.0%}" for share in shares), f"{self.nbytes - 1:+.0%}" if self.nbytes else "",
            f"{it.source.title}, {it.table}",
        )  # fmt: skip


def compared(run: Run, known: Callable[..., ModelCosts] = costs) -> Compared:
    """The run beside its fastest case; of kernels that are fused in part, beside the mean of both kinds."""
    it, found = run.settings, dict[bool, list[Prediction]]()
    for case in cases(run):
        single = it.experts == "single" and case.float8 is not None
        own = known(run.architecture, it.length, case.float8, attention=it.attention, dropout=it.dropout, single=single)
        own = saved_by_fused_kernels(own) if it.kernels == "fused" else own
        own = with_fused_loss(own) if it.loss == "fused" else own
        request = PlanRequest(own, case.machines, it.batch, it.length, "bfloat16", case.usual)
        priced = predict(request, case.setting)
        if priced is None:
            raise ValueError(f"{run.name}: {case.setting.schedule} has no table for {case.setting.microbatches} microbatches")
        found.setdefault(case.usual.compiled, []).append(priced)
    best = [min(each, key=lambda one: one.seconds.total) for each in found.values()]
    parts = {part.name: mean(getattr(one.seconds, part.name) for one in best) for part in fields(StepSeconds)}
    return Compared(run, StepSeconds(**parts), max(one.peak for one in best))


def chosen(groups: Sequence[str] | None, names: Sequence[str] | None) -> list[Run]:
    """The runs of some groups whose names have one of the parts; without either, the documented runs."""
    runs = read_runs()
    if unknown := set(groups or ()) - {run.group for run in runs}:
        raise SystemExit(f"--group: {sorted(unknown)}; groups are {sorted({run.group for run in runs})}")
    if groups is not None or names:
        runs = tuple(run for run in runs if not groups or run.group in groups)
        return [run for run in runs if not names or any(part in run.name for part in names)]
    return [run for run in runs if run.documented]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of the names of runs")
    parser.add_argument("--group", nargs="*", help="names of files of benchmarks/published; none: all")
    option = parser.parse_args()
    runs, console, progress = chosen(option.group, option.only), Console(width=240), Console(stderr=True)
    table = Table("run", "published", "predicted", "difference", "collectives", "idle", "gradients", "bytes", "source")
    found = []
    for run in runs:
        if run.cannot is None:
            found.append(compared(run))
            table.add_row(*found[-1].row())
            progress.print(f"{run.name}: {found[-1].error:+.0%}")
    console.print(table)
    for run in runs:
        if run.cannot is not None:
            console.print(f"not priced: {run.name}: {run.cannot}")
    if option.group is not None:
        table = Table("group", "runs", "bias", "median", "90 %", "tau", f"tau beyond {NOISE:.0%}")
        for group in sorted({each.run.group for each in found}):
            table.add_row(*summary(group, [each for each in found if each.run.group == group]))
        table.add_row(*summary("all", found))
        console.print(table)
        table = Table("runs that differ in their layout", "number", "predicted to be fastest", "fastest", "slower by")
        for row in choices(found):
            table.add_row(*row)
        console.print(table)
        table = Table("kind", "runs", "published over predicted seconds, 10 to 90 %")
        for row in error_bars(found):
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
