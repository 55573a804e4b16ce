"""The models of the published runs, and their captured costs for rows of some length."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from published_kernels import experts_in_float8
from published_runs import Model
from torch import Tensor

import graphpp
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts

CONFIGS = {
    "llama": transformers.LlamaConfig, "gpt": transformers.Starcoder2Config, "mixtral": transformers.MixtralConfig,
    "qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig, "deepseek_v3": transformers.DeepseekV3Config,
}  # fmt: skip
LATENT = {  # multi-head latent attention, which transformers' own plan does not cut
    "model.layers.*.self_attn.q_b_proj": "colwise", "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}  # fmt: skip


def _causal(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Causal attention without a mask; narrower values are padded to the width of the keys, as for a fused kernel."""
    more, grouped = key.shape[-1] - value.shape[-1], query.shape[1] != key.shape[1]
    wide = F.pad(value, (0, more)) if more else value
    found = F.scaled_dot_product_attention(query, key, wide, is_causal=True, scale=options["scaling"], enable_gqa=grouped)
    return found[..., : value.shape[-1]].transpose(1, 2), None


def _repeated(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """As `_causal`, with a copy of each key and value for every query head, before kernels knew of grouped queries."""
    copies = query.shape[1] // key.shape[1]
    return _causal(module, query, *(each.repeat_interleave(copies, 1) for each in (key, value)), mask, **options)


def _unfused(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Causal attention as two products around a softmax, with all scores in memory."""
    rows = torch.arange(query.shape[-2], device=query.device)
    scores = (query @ key.transpose(-1, -2) * options["scaling"]).masked_fill(rows[:, None] < rows, float("-inf"))
    shares = F.dropout(scores.softmax(-1), options["dropout"], training=options["dropout"] > 0)
    return (shares @ value).transpose(1, 2), None


def _attention(name: str) -> Callable[..., tuple[Tensor, None]]:
    return {"newest": _causal, "unfused": _unfused}.get(name, _repeated)


def config(model: Model, length: int, *, attention: str = "newest", dropout: float = 0.0) -> Any:
    """The transformers config. A "gpt" is a Starcoder 2: its positions are rotated, not learned; its other parts are GPT's."""
    own: dict[str, Any] = {"sliding_window": None} if model.family in ("gpt", "mixtral") else {}
    if model.family == "deepseek_v3" and model.latent is not None:
        it = model.latent
        own |= {
            "q_lora_rank": it.queries, "kv_lora_rank": it.keys, "qk_nope_head_dim": it.plain, "qk_rope_head_dim": it.rotary,
            "v_head_dim": it.values, "first_k_dense_replace": model.dense, "n_shared_experts": model.shared,
            "n_routed_experts": model.experts, "moe_intermediate_size": model.expert_ffn,
        }  # fmt: skip
    elif model.family == "qwen3_moe":
        own |= {"num_experts": model.experts, "moe_intermediate_size": model.expert_ffn, "head_dim": model.head}
    elif model.family == "mixtral":
        own |= {"num_local_experts": model.experts}
    elif model.family == "qwen3":
        own |= {"head_dim": model.head}
    if model.family == "gpt":
        own |= dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), dropout)
    own |= {"num_experts_per_tok": model.per_token} if model.experts else {}
    made: Any = CONFIGS[model.family](
        use_cache=False, max_position_embeddings=length, hidden_size=model.hidden, intermediate_size=model.ffn,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        vocab_size=model.vocabulary, tie_word_embeddings=model.tied, **own,
    )  # fmt: skip
    if model.experts:
        made._experts_implementation = "grouped_mm"
    made._attn_implementation = _attention(attention).__name__
    return made


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


@cache
def costs(
    model: Model, length: int, float8: str | None, *, attention: str = "newest", dropout: float = 0.0, single: bool = False
) -> ModelCosts:
    """The costs of a model for rows of `length` tokens. `single`: each expert's rows in float8 are scaled by kernels of their
    own."""
    kernel = _attention(attention)
    transformers.AttentionInterface.register(kernel.__name__, kernel)
    transformers.AttentionMaskInterface.register(kernel.__name__, lambda *args, **options: None)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config(model, length, attention=attention, dropout=dropout))
        tokens = torch.empty(1, length, dtype=torch.int64)
    plan = {**made.tp_plan, **LATENT} if model.latent is not None else None
    example = graphpp.Microbatch((), {"input_ids": tokens}, tokens)
    found = capture_costs(made, loss, example, tensor_plan=plan, float8=float8)
    return found if float8 is None else experts_in_float8(found, float8, model.experts if single else 0)
