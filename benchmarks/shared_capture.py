"""CPU seconds that each rank spends to get the captured graph of a Llama of 405 billion parameters.

    torchrun --nproc-per-node 2 benchmarks/shared_capture.py [--layers 16] [--length 4096]

Contract: the model stands on the meta device. Rank 0 captures, writes the graph and reads it; the other ranks walk over their
model and read the graph. CPU seconds of each process, single-threaded; the time in which a rank waits does not count.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from harness import RANK, start
from models import llama_405b, loss, new_llama

import graphpp
from graphpp.batch.microbatch import flatten_microbatch
from graphpp.compiler.capture_once import capture_graphs
from graphpp.compiler.request import CompileRequest
from graphpp.options.options import Options
from graphpp.parallel.agreement import Agreement
from graphpp.parallel.rank_place import RankPlace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096, help="tokens in a row")
    option = parser.parse_args()
    start()
    warm_up = seconds(1, 16)  # imports the tracing parts of torch
    spent = torch.tensor(seconds(option.layers, option.length))
    every = [torch.zeros_like(spent) for _ in range(dist.get_world_size())]
    dist.all_gather(every, spent)
    if RANK == 0:
        first = float(every[0])
        print(f"{option.layers} layers; the first capture of the process took {warm_up:.2f} CPU s with its imports")
        for rank, each in enumerate(every):
            print(f"rank {rank}: {float(each):.2f} CPU s, {float(each) / first:.1%} of rank 0")
    dist.destroy_process_group()


def seconds(layers: int, length: int) -> float:
    """CPU seconds of this rank for the graph of a model of so many layers."""
    model = new_llama(llama_405b(layers), "meta")
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    place = RankPlace(torch.device("cpu"), dist.group.WORLD)
    request = CompileRequest(model, loss, Options(), place)
    example = flatten_microbatch(graphpp.Microbatch((tokens,), target=tokens))
    agreement = Agreement(dist.group.WORLD, place.device)
    began = time.process_time()
    capture_graphs(request, agreement, [example], training=True, open_sizes=[{}])
    return time.process_time() - began


if __name__ == "__main__":
    main()
