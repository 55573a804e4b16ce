"""Compare a step under `split="auto"` with one under equal numbers of layers, for models with a large vocabulary.

    torchrun --nproc-per-node 2 benchmarks/auto_split.py [--vocabularies 256 32000 128000] [--schedules 1F1B ZBVZeroBubble]

The model is a Llama of transformers with random weights. Losses must be equal in every bit first. Medians over rounds; a ratio
is the median of the rounds' ratios to equal layers.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import RANK, Contender, alternate, median_ratio, medians, start
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from workloads import add_sizes

import graphpp

SPLITS: dict[str, Any] = {"equal layers": None, "auto": "auto"}


def pipeline(option: argparse.Namespace, vocabulary: int, schedule: str, split: Any) -> graphpp.Pipeline:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=option.dim,
        intermediate_size=4 * option.dim,
        num_hidden_layers=option.layers,
        num_attention_heads=max(4, option.dim // 64),
        num_key_value_heads=max(4, option.dim // 64),
    )
    parallel = graphpp.Parallel(check_data=0)
    return graphpp.compile(
        LlamaForCausalLM(config), split=split, schedule=schedule, microbatches=option.microbatches, parallel=parallel
    )


def record(option: argparse.Namespace, vocabulary: int, schedule: str, device: torch.device) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (option.microbatches * option.rows, option.length), generator=draw)
    pipes = {name: pipeline(option, vocabulary, schedule, split) for name, split in SPLITS.items()}
    losses = [pipe.step(input_ids=ids, labels=ids).losses for pipe in pipes.values()]
    if not torch.equal(*losses):
        raise SystemExit(f"losses differ: {losses}")
    timed = {
        name: Contender(lambda pipe=pipe: pipe.step(input_ids=ids, labels=ids), pipe.zero_grad) for name, pipe in pipes.items()
    }
    alternate(timed, 1, device)
    samples = alternate(timed, option.rounds, device)
    return {
        "vocabulary": vocabulary, "schedule": schedule,
        "ratio": median_ratio(samples["auto"], samples["equal layers"]),
        "seconds": {name: medians(taken).seconds for name, taken in samples.items()},
        "modules": {name: [stage.modules for stage in pipe.plan.stages] for name, pipe in pipes.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[256, 32_000, 128_000])
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "ZBVZeroBubble"])
    parser.add_argument("--dim", type=int, default=512)
    add_sizes(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the records")
    option = parser.parse_args()
    device = start()
    records = [record(option, *case, device) for case in product(option.vocabularies, option.schedules)]
    if RANK == 0:
        Console(width=160).print(table(records))
        if option.json:
            Path(option.json).write_text(json.dumps({"records": records}, indent=1))
    dist.destroy_process_group()


def table(records: list[dict[str, Any]]) -> Table:
    found = Table("vocabulary", "schedule", "equal layers, s", "auto, s", "ratio", "stages of auto")
    for each in records:
        seconds = (f"{each['seconds'][name]:.3f}" for name in SPLITS)
        stages = " | ".join(", ".join(modules) for modules in each["modules"]["auto"])
        found.add_row(f"{each['vocabulary']:,}", each["schedule"], *seconds, f"{each['ratio']:.2f}", stages)
    return found


if __name__ == "__main__":
    main()
