"""Compare a large head in the best cut with a head whose words are cut over all ranks, on ranks that compute without a core.

    torchrun --nproc-per-node 4 benchmarks/words.py [--layers 4] [--head 3] [--ms 20] [--schedules 1F1B ZBVZeroBubble ..]

Every matrix product sleeps for a time in proportion to its operations, so 4 processes on 2 cores run as 4 devices would. A
layer is two linear layers whose three phases take --ms each for a microbatch; the head takes --head times as long. Every
schedule runs with `split="auto"`, which cuts where the simulated step is fastest, with the head whole and, where it has two
stages a rank, with `memory.word_parts`. Losses of all must be equal within rounding before anything is timed. The ratio is the
fastest step with a whole head over the fastest with cut words, the median over rounds of steps in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import RANK, RANKS, Contender, alternate, median_ratio, medians, start
from rich.console import Console
from rich.table import Table
from sleeping_stages import sleep
from torch import fx, nn

import graphpp

_WIDTH, _TOKENS = 16, 8
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.up(x).relu())
        return x + down


class Decoder(nn.Module):
    def __init__(self, layers: int, words: int) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(words, _WIDTH), nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(_WIDTH, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Device:
    """Products take `seconds` for each multiplication; all else takes no time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def of(self, node: fx.Node) -> float:
        if node.target not in _PRODUCTS:
            return 0.0
        first, second = (each.meta["val"] for each in node.all_input_nodes[-2:])
        return self._seconds * int(first.shape[0]) * int(first.shape[1]) * int(second.shape[1])

    def compile(self, module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        """The backend of a pipeline: a region runs, and sleeps for the rest of its time."""
        seconds = sum(map(self.of, module.graph.nodes))

        def run(*args: torch.Tensor) -> Any:
            began = time.perf_counter()
            found = module(*args)
            sleep(began, seconds)
            return found

        return run


def pipeline(option: argparse.Namespace, schedule: str, parts: int | None) -> graphpp.Pipeline:
    torch.manual_seed(0)
    words = round(option.head * 8 * _WIDTH)
    device = Device(option.ms / 1e3 / (8 * _WIDTH**2 * _TOKENS))
    return graphpp.compile(
        Decoder(option.layers, words),
        loss,
        split="auto",
        schedule=schedule,
        microbatches=option.times * RANKS,
        backend=device.compile,
        memory=graphpp.Memory(word_parts=parts),
        parallel=graphpp.Parallel(op_costs=device.of, check_data=0),
    )


def main() -> None:
    option = options()
    device = start()
    pipes: dict[tuple[str, bool], graphpp.Pipeline] = {}
    for schedule in option.schedules:
        pipes[schedule, False] = pipeline(option, schedule, None)
        if schedule != "1F1B":
            pipes[schedule, True] = pipeline(option, schedule, RANKS)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(round(option.head * 8 * _WIDTH), (option.times * RANKS, _TOKENS), generator=draw)
    losses = [pipe.step(tokens, target=tokens).losses for pipe in pipes.values()]
    for found in losses:
        torch.testing.assert_close(found, losses[0])
    steps = {key: Contender(partial(pipe.step, tokens, target=tokens), pipe.zero_grad) for key, pipe in pipes.items()}
    taken = alternate({str(key): each for key, each in steps.items()}, option.rounds, device)
    seconds = {key: medians(taken[str(key)]).seconds for key in steps}
    simulated = {key: pipe.profile(tokens, target=tokens, repeat=1).costs for key, pipe in pipes.items()}
    if RANK == 0:
        title = f"{RANKS} ranks, {option.layers} layers, a head of {option.head:g}: ms of a step"
        table = Table(title=title, title_justify="left")
        for column in ("schedule", "words", "measured", "simulated"):
            table.add_column(column, justify="right")
        for key, measured in seconds.items():
            expected = graphpp.simulate(pipes[key].plan.schedule, simulated[key]).makespan
            table.add_row(key[0], "cut" if key[1] else "whole", f"{1e3 * measured:.0f}", f"{1e3 * expected:.0f}")
        Console(width=120).print(table)
        best = [min((key for key in seconds if key[1] is cut), key=seconds.__getitem__) for cut in (False, True)]
        ratio = median_ratio(taken[str(best[0])], taken[str(best[1])])
        print(f"{best[0][0]} with a whole head over {best[1][0]} with cut words: {ratio:.2f}")
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--head", type=float, default=3.0, help="the time of the head in layers")
    parser.add_argument("--ms", type=float, default=20.0, help="of each phase of a layer, for a microbatch")
    parser.add_argument("--times", type=int, default=4, help="microbatches for each rank")
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
