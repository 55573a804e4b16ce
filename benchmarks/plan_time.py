"""Time `graphpp.plan` for models of published sizes, from one process and on the meta device.

    python benchmarks/plan_time.py [--only NAME ...]

Prints the CPU seconds of torch's and transformers' imports with the model, of the capture with its costs, and of the search;
and the best plan, or the first sentence of a refusal. The seconds of the imports and of the model do not count: a program that
trains has them too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import published_models
import torch
import transformers
from published_runs import read_runs
from rich.console import Console
from rich.table import Table

import graphpp
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts

STARTED = time.process_time()
Capture = Callable[[], ModelCosts]


@dataclass(frozen=True)
class Question:
    """`made` builds a model and returns its capture; machines, and a batch of so many rows; `most`: CPU seconds of a plan."""

    made: Callable[[], Capture]
    machines: str
    batch: int
    most: int = 10


def of_runs(name: str, length: int) -> Callable[[], Capture]:
    """A model of `published/models.json`, for rows of `length` tokens; its construction is a part of the capture."""
    model = next(run.architecture for run in read_runs() if run.model == name)
    assert transformers.LlamaForCausalLM and transformers.DeepseekV3ForCausalLM  # loaded when they are asked for
    return lambda: lambda: published_models.costs(model, length, None)


def of_config(name: str, sizes: dict[str, tuple[int, ...]], **options: Any) -> Callable[[], Capture]:
    """A model of transformers in bfloat16 by the prefix of its classes' names, and the sizes of its inputs: those of
    `input_features` and `inputs_embeds` are numbers, all others are tokens."""

    def made() -> Capture:
        config = getattr(transformers, f"{name}Config")(**options)
        for each in (config, config.get_text_config()):
            each.use_cache = False
        kind = next(found for end in _ENDS if (found := getattr(transformers, name + end, None)))
        with torch.device("meta"):
            model = kind(config).train().to(torch.bfloat16)
            inputs = {each: torch.empty(size, dtype=_DTYPES.get(each, torch.int64)) for each, size in sizes.items()}
        return lambda: capture_costs(model, None, graphpp.Microbatch((), inputs))

    return made


_ENDS = ("ForConditionalGeneration", "ForCausalLM")
_DTYPES = {"input_features": torch.bfloat16, "inputs_embeds": torch.bfloat16}
_TOKENS = {"input_ids": (1, 2048), "labels": (1, 2048)}
QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}  # fmt: skip
QUESTIONS = {
    "DeepSeek-V3": Question(of_runs("DeepSeek-V3", 4096), "1024xH100", 8192, 60),
    "Llama-405B": Question(of_runs("Llama 3 405B", 8192), "512xH100", 512, 45),
    "Whisper large": Question(
        of_config(
            "Whisper", {"input_features": (1, 80, 3000), "labels": (1, 448)}, d_model=1280, encoder_layers=32,
            decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20, encoder_ffn_dim=5120,
            decoder_ffn_dim=5120,
        ),
        "8xH100", 64,
    ),
    "Mamba 2 2.7B": Question(
        of_config("Mamba2", _TOKENS, num_heads=80, hidden_size=2560, num_hidden_layers=64, vocab_size=50288, n_groups=1),
        "8xH100", 64,
    ),
    "Bamba 9B": Question(of_config("Bamba", _TOKENS, attn_layer_indices=[9, 18, 27]), "8xH100", 64),
    "T5 XXL": Question(
        of_config(
            "T5", {"input_ids": (1, 512), "labels": (1, 512)}, d_model=4096, d_kv=64, d_ff=10240, num_layers=24,
            num_heads=64, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
        ),
        "16xA100", 128,
    ),
    "Llava 7B": Question(of_config("Llava", {"inputs_embeds": (1, 2048, 4096), "labels": (1, 2048)}), "8xH100", 64),
    "Qwen2.5-VL 7B": Question(
        of_config("Qwen2_5_VL", {"inputs_embeds": (1, 2048, 3584), "labels": (1, 2048)}, text_config=QWEN_7B), "16xH100", 128
    ),
}  # fmt: skip


@contextmanager
def stopped(into: list[float]) -> Iterator[None]:
    """Add the CPU seconds within the context to a list."""
    before = time.process_time()
    try:
        yield
    finally:
        into.append(time.process_time() - before)


def record(name: str) -> tuple[str, ...]:
    """A line of the table."""
    question, seconds = QUESTIONS[name], list[float]()
    with stopped(seconds):
        captured = question.made()
    try:
        with stopped(seconds):
            costs = captured()
        with stopped(seconds):
            found = graphpp.plan(costs, machines=question.machines, batch=question.batch)
    except graphpp.GraphPPError as error:
        return name, *(f"{each:.1f}" for each in seconds), f"refused: {str(error).splitlines()[0]}"
    together, best = seconds[1] + seconds[2], found.best
    return (
        name, *(f"{each:.1f}" for each in seconds), f"{together:.1f} of {question.most}",
        f"{len(found)} of {found.considered:,}",
        f"{best.step_seconds:.2f} s, MFU {best.mfu:.1%}: {best.setting}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(QUESTIONS))
    option = parser.parse_args()
    table = Table("model", "model", "capture, costs", "search", "together", "simulated", "best step", title="CPU seconds")
    for name in option.only or QUESTIONS:
        table.add_row(*record(name))
    Console(width=240).print(f"imports: {STARTED:.1f} s", table)


if __name__ == "__main__":
    main()
