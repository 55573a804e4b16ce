"""Published models of 100 to 700 billion parameters on the meta device, with fewer layers if asked.

Contract: `LARGE[name].new(layers)` is a model in training mode, `LARGE[name].example(length)` a microbatch of one row. The
configurations are those of transformers' defaults or of the models' own `config.json`; experts are one grouped product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import llama_405b, loss, new_llama
from torch import nn

import graphpp


@dataclass(frozen=True)
class LargeModel:
    """A model by its number of layers; `loss` is None for a model that returns its own."""

    layers: int
    new: Callable[[int], nn.Module]
    loss: Any = None

    def example(self, length: int) -> graphpp.Microbatch:
        """One row of tokens on the meta device."""
        tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
        if self.loss is not None:
            return graphpp.Microbatch((tokens,), target=tokens)
        return graphpp.Microbatch((), {"input_ids": tokens, "labels": tokens})


def of_transformers(config: str, model: str, **options: Any) -> Callable[[int], nn.Module]:
    """How to build a model of transformers in bfloat16, by the names of its classes."""

    def new(layers: int) -> nn.Module:
        import transformers

        chosen = getattr(transformers, config)(num_hidden_layers=layers, use_cache=False, **options)
        chosen._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            built: nn.Module = getattr(transformers, model)(chosen)
        return built.train().to(torch.bfloat16)

    return new


QWEN3_235B = {
    "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "vocab_size": 151936,
}  # fmt: skip
LARGE = {
    "llama": LargeModel(126, lambda layers: new_llama(llama_405b(layers), "meta"), loss),
    "deepseek_v3": LargeModel(61, of_transformers("DeepseekV3Config", "DeepseekV3ForCausalLM")),
    "qwen3_235b": LargeModel(94, of_transformers("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **QWEN3_235B)),
    "gpt_oss_120b": LargeModel(36, of_transformers("GptOssConfig", "GptOssForCausalLM")),
}
