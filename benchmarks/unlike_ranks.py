"""Compare equal stages with stages cut by speed, on ranks of which half take longer for the same layers.

    torchrun --nproc-per-node 8 benchmarks/unlike_ranks.py [--ms 10] [--slower 2] [--layers 24] [--schedule 1F1B]

A layer's F, I and W sleep (sleeping_stages.py) for --ms each, and --slower times as long on the second half of the ranks, so 8
processes on 2 cores run a pipeline on unlike devices. The cut by speed is that of the planner (`balanced_on`).

    simulated   the makespan of the table with the times of each cut, and messages that take none
    measured    the median of whole `pipe.step`
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise

import sleeping_stages
import torch.distributed as dist
from harness import RANK, RANKS, Contender, alternate, medians, start

import graphpp
from graphpp.planner.balance import balanced_on


def main() -> None:
    option = options()
    device = start()
    rows = option.times * RANKS
    homes = graphpp.schedules.SCHEDULES[option.schedule](RANKS, RANKS * option.stages, rows).rank_of_stage
    factors = [1.0 if homes[stage] < RANKS / 2 else option.slower for stage in sorted(homes)]
    layer = [option.ms / 1e3] * option.layers
    slow_layer = [option.slower * each for each in layer]
    cuts = {
        "equal": balanced_on([layer], [0] * len(factors)),
        "by speed": balanced_on([layer, slow_layer], [int(each > 1) for each in factors]),
    }
    as_usual, own = sleeping_stages.sleep, 1.0 if RANK < RANKS / 2 else option.slower
    sleeping_stages.sleep = lambda began, seconds: as_usual(began, own * seconds)
    work = sleeping_stages.workload(64, sleeping_stages.alike(option.layers, option.ms / 1e3))
    inputs, targets = work.batch(rows)
    runs, simulated = {}, {}
    for name, cut in cuts.items():
        assert cut is not None
        bounds = list(pairwise((*cut, option.layers)))
        split = [f"layers.{first}" for first in cut[1:]]
        pipe = graphpp.compile(work.model(), work.loss, split=split, schedule=option.schedule, microbatches=rows)
        pipe.step(inputs, target=targets)
        stages = [(end - first) * factor * layer[0] for (first, end), factor in zip(bounds, factors, strict=True)]
        first = graphpp.StageCosts(stages[0], stages[0] * (1 - 1 / cut[1]), stages[0])  # the batch needs no gradient
        costs = graphpp.Costs((first, *(graphpp.StageCosts(each, each, each) for each in stages[1:])))
        simulated[name] = graphpp.simulate(pipe.plan.schedule, costs).makespan
        runs[name] = Contender(lambda pipe=pipe: pipe.step(inputs, target=targets))
    if option.real_time:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))
    taken = {name: medians(samples).seconds for name, samples in alternate(runs, option.rounds, device).items()}
    if RANK == 0:
        for name, cut in cuts.items():
            layers = "+".join(str(end - first) for first, end in pairwise((*cut, option.layers)))
            over = taken[name] / simulated[name] - 1
            print(f"{name:9} {layers}: simulated {simulated[name]:.3f} s, measured {taken[name]:.3f} s ({100 * over:+.1f} %)")
        print(f"by speed over equal: simulated {simulated['by speed'] / simulated['equal']:.3f}, "
              f"measured {taken['by speed'] / taken['equal']:.3f}")
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", type=float, default=10.0, help="of F, of I and of W of a layer on the first half of the ranks")
    parser.add_argument("--slower", type=float, default=2.0, help="times as long on the second half")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--stages", type=int, default=1, help="for each rank")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--times", type=int, default=2, help="microbatches for each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real-time", action="store_true", help="steps run before what else the cores do, which needs rights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
