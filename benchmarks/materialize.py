"""Measure the memory and the time that a rank takes to get its part of a model, by way of getting it.

    python benchmarks/materialize.py [--ranks 2 4] [--megabytes 1000] [--ways init seed safetensors dcp pt whole]

A Llama of about --megabytes in fp32 is cut into as many stages as ranks. For each way and number of ranks new processes
run: "init" the numbers of one process, "seed" a generator for each module, "safetensors" (with an index), "dcp" and "pt"
files of the whole model; "whole": every rank builds the model, and gives back the parts of the others.

Anonymous memory (RssAnon: pages of files do not count) above that of the compiled model on the meta device, or, for "whole",
of the process before the model was built; sampled every 2 ms. Each line has the rank with the highest peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import RANK, RANKS, start
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp

WAYS = ("init", "seed", "safetensors", "dcp", "pt", "whole")
MB = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--way", choices=WAYS, help="of this rank: set by the script itself")
    parser.add_argument("--files", type=Path, help="set by the script itself")
    option = parser.parse_args()
    if option.way:
        return measure(option)
    shown = Table("way", "ranks", "own MB", "peak MB", "peak / own", "after / own", "seconds")
    with tempfile.TemporaryDirectory() as folder:
        write_files(option.megabytes, Path(folder), option.ways)
        for way in option.ways:
            for ranks in option.ranks:
                found = max(run(way, ranks, option.megabytes, Path(folder)), key=lambda each: float(each["peak"]))
                own = found["own"]
                figures = [found["peak"] / own, found["after"] / own, found["seconds"]]
                sizes = [f"{own / MB:.0f}", f"{found['peak'] / MB:.0f}"]
                shown.add_row(way, str(ranks), *sizes, *(f"{each:.2f}" for each in figures))
    Console(width=120).print(shown)
    return None


def config(megabytes: int) -> LlamaConfig:
    """A Llama of 16 layers with about so many bytes of fp32 parameters."""
    width = max(64, round((megabytes * MB / 4 / 16 / 12) ** 0.5 / 64) * 64)
    sizes = {"hidden_size": width, "intermediate_size": 8 * width // 3, "vocab_size": 4 * width, "num_hidden_layers": 16}
    return LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=False, use_cache=False)


def write_files(megabytes: int, folder: Path, ways: list[str]) -> None:
    """The whole model in each format that is asked for."""
    if not {"safetensors", "dcp", "pt"} & set(ways):
        return
    state = {key: value.detach() for key, value in LlamaForCausalLM(config(megabytes)).state_dict().items()}
    (folder / "safetensors").mkdir()
    where = {}
    for number, name in enumerate(state):
        where[name] = f"model-{number // 10:05}.safetensors"
    for file in set(where.values()):
        save_file({name: state[name] for name in state if where[name] == file}, folder / "safetensors" / file)
    (folder / "safetensors" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(state, folder / "pt.pt")


def run(way: str, ranks: int, megabytes: int, folder: Path) -> list[dict[str, Any]]:
    """The figures of all ranks."""
    arguments = ["--way", way, "--megabytes", str(megabytes), "--files", str(folder)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, __file__, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if ended.returncode:
        raise SystemExit(f"{way} on {ranks} ranks failed:\n{ended.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / f"{way}-{ranks}.json").read_text().splitlines()]


def measure(option: argparse.Namespace) -> None:
    """Get this rank's part one way, and write this rank's figures."""
    start()
    tokens = torch.zeros(1, 16, dtype=torch.long)
    example = graphpp.Microbatch((tokens,), {"labels": tokens})
    before = anonymous()
    with torch.device("cpu" if option.way == "whole" else "meta"), sampled() as whole:
        model = LlamaForCausalLM(config(option.megabytes))
    began = time.perf_counter()
    if option.way == "whole":
        with sampled() as peaks:
            pipe = graphpp.compile(model, example=example, split=RANKS, schedule="1F1B", microbatches=RANKS)
        peaks += whole
    else:
        pipe = graphpp.compile(model, example=example, split=RANKS, schedule="1F1B", microbatches=RANKS)
        gc.collect()
        before = anonymous()
        began = time.perf_counter()
        files = {"safetensors": "safetensors", "dcp": "dcp", "pt": "pt.pt"}
        with sampled() as peaks:
            if option.way in files:
                pipe.materialize(model._init_weights, weights=option.files / files[option.way])
            else:
                torch.manual_seed(0)
                pipe.materialize(model._init_weights, seed=0 if option.way == "seed" else None)
    own = sum(tensor.nbytes for tensor in [*pipe.parameters(), *pipe.buffers()])
    seconds = time.perf_counter() - began
    found = {"own": own, "peak": max(peaks) - before, "after": anonymous() - before, "seconds": seconds}
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, found)
    if RANK == 0:
        (option.files / f"{option.way}-{RANKS}.json").write_text("\n".join(map(json.dumps, everyone)))
    dist.destroy_process_group()


@contextmanager
def sampled() -> Iterator[list[int]]:
    """The anonymous memory of this process, every 2 ms."""
    found, over = [anonymous()], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            found.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        found.append(anonymous())


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
