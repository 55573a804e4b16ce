"""Mixtures of transformers whose experts are on another factorisation of the ranks than attention, and one process.

Contract: the models are those of the library, unchanged; their experts call `routed`, which stands in transformers' registry of
experts. `train_on_meshes` runs on one rank: attention is spread over `tp` or `cp` of the first mesh, experts over `ep` and
`etp` of the second. Along `tp` the mixture sees this rank's tokens of each sequence. `train_alone` is a plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import graphpp
from graphpp.experts import routed
from tests.sharding import Mesh
from tests.zoo.models import GROUPED
from tests.zoo.on_meshes import (
    MICROBATCHES,
    Trained,
    batch,
    example,
    loss,
    part,
    register_ulysses,
    trained,
    trained_alone,
)

EXPERTS = 4
MIXTURES = {"mixtral": ("MixtralConfig", "MixtralForCausalLM"), "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM")}
OF_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,  # of the rotary embedding
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
ROUTED = "graphpp_routed"  # the name in transformers' registry of experts


def mixture(name: str, groups: Mapping[str, Any], attention: str | None = None) -> Any:
    """`groups`: the process groups that `routed` takes. `attention`: a name in transformers' registry of attentions."""

    def run(module: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return routed(tokens, chosen, weights, lambda x: answers(module, x), EXPERTS, **groups)

    ALL_EXPERTS_FUNCTIONS.register(ROUTED, run)
    torch.manual_seed(0)
    config_class, model_class = (getattr(transformers, each) for each in MIXTURES[name])
    own = {"num_local_experts": EXPERTS} if name == "mixtral" else OF_DEEPSEEK
    config = config_class(**{**GROUPED, "tie_word_embeddings": False, **own})
    config._experts_implementation = ROUTED
    if attention is not None:
        config._attn_implementation = attention
    model = model_class(config).train()
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            if fqn.endswith(("gate_up_proj", "experts.down_proj", "mlp.gate.weight")):
                parameter.normal_(std=0.1)
    return model


def answers(module: Any, x: Tensor) -> Tensor:
    """[experts of this rank, slots, width] in and out."""
    gate_up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (module.gate_up_proj, module.down_proj))
    gate, up = torch.bmm(x, gate_up.transpose(1, 2)).chunk(2, -1)
    return torch.bmm(module.act_fn(gate) * up, down.transpose(1, 2))


def place_experts(model: Any, mesh: DeviceMesh) -> None:
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            for name in ("gate_up_proj", "down_proj"):
                weight = distribute_tensor(getattr(module, name).detach(), mesh["ep"], [Shard(0)])
                setattr(module, name, nn.Parameter(weight))


def spread_attention(model: Any, mesh: DeviceMesh) -> None:
    """Attention over the heads of a rank (DeepSeek-V3's stays whole, as in the library's own plan); within a mixture a rank has
    its own tokens of each sequence."""
    heads = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "k_proj"):
            parallelize_module(layer.self_attn, mesh, {**heads, "o_proj": RowwiseParallel()})
        if not hasattr(layer.mlp, "experts"):
            parallelize_module(
                layer.mlp, mesh, {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            )
            continue
        whole, cut = (Replicate(),), (Shard(1),)
        inputs = {"input_layouts": whole, "desired_input_layouts": cut, "use_local_input": True}
        around = PrepareModuleInputOutput(**inputs, output_layouts=cut, desired_output_layouts=whole)
        parallelize_module(layer.mlp, mesh, around)
        for name in ("gate", "shared_experts"):
            if hasattr(layer.mlp, name):
                compute_on_own_tokens(getattr(layer.mlp, name), mesh)


def compute_on_own_tokens(root: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank has the parameters whole, computes on its own tokens, and the gradients of all ranks are added up."""
    for module in root.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            whole = distribute_tensor(getattr(module, name).detach(), mesh, [Replicate()])
            setattr(module, name, nn.Parameter(whole))
        if names:
            module.forward = reading_locally(module, module.forward, names)


def reading_locally(module: nn.Module, forward: Any, names: list[str]) -> Any:
    def run(*args: Any) -> Any:
        own = {name: module._parameters.pop(name) for name in names}
        try:
            for name, each in own.items():
                vars(module)[name] = each.to_local(grad_placements=[Partial()])
            return forward(*args)
        finally:
            for name, each in own.items():
                vars(module).pop(name)
                module._parameters[name] = each

    return run


def train_on_meshes(rank: int, name: str, mesh: Mesh, experts: Mesh, options: Mapping[str, Any]) -> Trained:
    """Train with each replica on batches of its own, which the ranks of `cp` share."""
    torch.set_num_threads(1)
    made, places = mesh.made(), experts.made()
    context: dist.ProcessGroup | None = made.get_group("cp") if "cp" in mesh.names else None
    model = mixture(name, {"group": places.get_group("ep")}, register_ulysses(context) if context is not None else None)
    place_experts(model, places)
    if "tp" in mesh.names:
        spread_attention(model, made["tp"])
    replica = mesh.replica(rank) // mesh.size("cp")
    parallel = graphpp.Parallel(expert_mesh=places, **options.get("parallel", {}))
    given = {"microbatches": MICROBATCHES, **options, "parallel": parallel}
    pipe = graphpp.compile(model, loss, example=example(part(batch(0), context)), mesh=made, **given)
    return trained(pipe, replica, context, "adamw")


def train_alone(name: str, replicas: int) -> Trained:
    """The same training by autograd and a loop over the microbatches of all replicas, without graphpp."""
    return trained_alone(mixture(name, {}), replicas, "adamw")
