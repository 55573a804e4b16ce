"""Attention of transformers' models with and without the pass that removes masks of positions: kernels, bytes, time, numbers.

    python benchmarks/attention_masks.py [--length 1024] [--dim 256] [--layers 4] [--rounds 5] [--models llama gemma3 ..]

Contract: two pipelines of a model train in one process on two stages, without a cache of keys (`use_cache=False`), as a trainer
runs them: `mask` is captured with the pass `causal_attention` left out. Steps of both are timed in turn. A row has the calls of
attention in the forward programs with and without a mask, the bytes of activations and of masks, the ratio of the seconds of a
step, and the largest difference of a gradient over its largest element.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from harness import Contender, alternate, median_ratio, start
from torch import nn

import graphpp
from graphpp.runtime.program import Phase

TEXT = {"use_cache": False, "vocab_size": 1024}
WINDOW = {"sliding_window": 128}


def decoder(name: str, **more: Any) -> Callable[[argparse.Namespace], nn.Module]:
    def made(option: argparse.Namespace) -> nn.Module:
        heads, sizes = 8, {"hidden_size": option.dim, "intermediate_size": 2 * option.dim, "num_hidden_layers": option.layers}
        kind = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
        width = {"num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": option.dim // heads}
        return getattr(transformers, f"{name}ForCausalLM")(kind(**TEXT, **sizes, **width, **more))  # type: ignore[no-any-return]

    return made


def vit(option: argparse.Namespace) -> nn.Module:
    side = 4 * round((option.length - 1) ** 0.5)
    sizes = {"hidden_size": option.dim, "intermediate_size": 2 * option.dim, "num_hidden_layers": option.layers}
    config = transformers.ViTConfig(image_size=side, patch_size=4, num_attention_heads=8, num_labels=16, **sizes)
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


MODELS = {
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral", **WINDOW),
    "qwen3": decoder("Qwen3"),
    "gemma3": decoder("Gemma3", **WINDOW),
    "gpt_oss": decoder("GptOss", num_local_experts=4, num_experts_per_tok=2, **WINDOW),
    "vit": vit,
}


def batch(name: str, model: nn.Module, option: argparse.Namespace) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    if name == "vit":
        side = model.config.image_size  # type: ignore[union-attr]
        return {"pixel_values": torch.randn(2, 3, side, side, generator=draw), "labels": torch.tensor([0, 1])}
    ids = torch.randint(0, TEXT["vocab_size"], (2, option.length), generator=draw)
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    option = parser.parse_args()
    device = start()
    for name in option.models:
        print(name, row(name, option, device), flush=True)


def row(name: str, option: argparse.Namespace, device: torch.device) -> str:
    steps, words, gradients = {}, {}, {}
    for kind in ("mask", "none"):
        torch.manual_seed(0)
        model = MODELS[name](option).to(device)
        given = {key: value.to(device) for key, value in batch(name, model, option).items()}
        passes = patch("graphpp.capture.trace.causal_attention", lambda module: 0) if kind == "mask" else patch.dict({})
        with passes:
            pipe = graphpp.compile(model, split=2, microbatches=2)
            pipe.step(**given)
        gradients[kind] = {fqn: each.grad.clone() for fqn, each in model.named_parameters() if each.grad is not None}
        words[kind] = f"{calls(pipe)}, {held(pipe):,} bytes"
        steps[kind] = Contender(partial(pipe.step, **given))
    times = alternate(steps, option.rounds, device)
    most = max(float((gradients["none"][fqn] - each).abs().max() / each.abs().max()) for fqn, each in gradients["mask"].items())
    ratio = median_ratio(times["none"], times["mask"])
    return f"{words['mask']} -> {words['none']}; step {ratio:.3f} of the time, gradients within {most:.1e}"


def calls(pipe: graphpp.Pipeline) -> str:
    """How many calls of attention the forward programs make with a mask, and how many without."""
    programs = [pipe.programs(stage.stage).programs[Phase.FORWARD].source for stage in pipe.plan.stages]
    lines = [line for source in programs for line in source.splitlines() if " = _aten__scaled_dot_product" in line]
    masked = sum("attn_mask=" in line for line in lines)
    return f"{masked} calls with a mask and {len(lines) - masked} without"


def held(pipe: graphpp.Pipeline) -> int:
    """Bytes of activations at the most, and of values that a step computes once: masks are among these."""
    assert pipe.plan.memory is not None
    parameters = sum(stage.parameter_bytes for stage in pipe.plan.stages)
    return sum(rank.activations + rank.weights for rank in pipe.plan.memory.ranks) - parameters


if __name__ == "__main__":
    main()
