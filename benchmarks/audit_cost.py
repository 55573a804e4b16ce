"""Time an audit against the capture, and steps with audits against steps without, on transformers' Llama in one process.

    python benchmarks/audit_cost.py [--small]

`audit`, `capture`: seconds of one audit, and of one capture of the training graph. `ratio`: seconds of all steps with default
audits by those with `Debug(audit=0)`, run in turn; the first steps have the audits 2, 4, 8, ...
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp
from graphpp.capture.trace import capture
from graphpp.capture.watch.operators import note_operators

CASES = ((4, 64, 400), (32, 64, 60))  # layers, width, steps
SMALL = ((1, 16, 4),)
TURN = 10  # steps of one contender in a row


def llama(layers: int, width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=256))


def measured(layers: int, width: int, steps: int) -> list[str]:
    """The row of one model."""
    tokens = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    example, device = graphpp.Microbatch(kwargs=batch), torch.device("cpu")
    began = time.perf_counter()
    capture(llama(layers, width), None, example, device)
    captured = time.perf_counter()
    note_operators(llama(layers, width), None, example, device, training=True)
    audited = time.perf_counter()
    pipes = {
        audit: graphpp.compile(llama(layers, width), None, split=1, microbatches=4, debug=graphpp.Debug(audit=audit))
        for audit in (None, 0)
    }
    for pipe in pipes.values():
        pipe.step(**batch)
    seconds = dict.fromkeys(pipes, 0.0)
    for _ in range(max(1, steps // TURN)):
        for audit, pipe in pipes.items():
            start = time.perf_counter()
            for _ in range(min(TURN, steps)):
                pipe.step(**batch)
            seconds[audit] += time.perf_counter() - start
    ratio, step = seconds[None] / seconds[0], 1000 * seconds[0] / (max(1, steps // TURN) * min(TURN, steps))
    row = layers, width, steps, f"{captured - began:.2f}", f"{audited - captured:.2f}", f"{step:.1f}", f"{ratio:.2f}"
    return [*map(str, row)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time audits")
    parser.add_argument("--small", action="store_true", help="one tiny model, to see that the script runs")
    torch.set_num_threads(1)
    table = Table(*("layers", "width", "steps", "capture, s", "audit, s", "step, ms", "ratio with audits"))
    for case in SMALL if parser.parse_args().small else CASES:
        table.add_row(*measured(*case))
    Console().print(table)


if __name__ == "__main__":
    main()
