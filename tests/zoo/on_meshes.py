"""Models of transformers on meshes, with their own tensor-parallel plans, and the same training in one process.

Contract
--------
- The models are those of the library, unchanged. `spread_by_transformers` applies the model's own plan with the functions of
  transformers on a mesh that is there already; `spread_by_torch` says the same plan in the styles of `parallelize_module`.
- `qwen3` has norms over the heads of a rank, which its plan gives a hook on gradients; `"heads"` is torch's style for them.
- Along `cp` the model computes attention by `graphpp.attention.ulysses`, which stands in transformers' registry of attentions.
- `train_on_mesh` runs on one rank; `train_alone` is a plain loop in one process over the batches of all replicas. Both clip
  the norm of the gradients, and both return whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphpp
from graphpp import attention
from graphpp.runtime.dtensors import whole_tensor
from tests.sharding import Mesh
from tests.zoo.models import GROUPED, VOCAB

ROWS, LENGTH, MICROBATCHES, STEPS = 8, 8, 4, 3
MAX_NORM = 0.5
ULYSSES = "graphpp_ulysses"  # the name in transformers' registries


def language_model(name: str = "llama", attention: str | None = None) -> Any:
    """`attention`: a name in transformers' registry of attentions."""
    torch.manual_seed(0)
    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    }
    config_class, model_class = kinds[name]
    config = config_class(**GROUPED, tie_word_embeddings=False, **({"num_local_experts": 4} if name == "mixtral" else {}))
    if attention is not None:
        config._attn_implementation = attention
    return model_class(config).train()


def spread_by_transformers(model: Any, mesh: DeviceMesh) -> None:
    """The model's own plan, by transformers' own functions."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))


def spread_by_torch(model: Any, mesh: DeviceMesh) -> None:
    """The model's own plan in torch's styles."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),  # [.., heads, width]
    }
    parallelize_module(model, mesh, {name: styles[style]() for name, style in model.tp_plan.items()})


def spread_with_heads(model: Any, mesh: DeviceMesh) -> None:
    """The model's own plan by transformers' own functions, but for norms over heads: a style of the caller's own."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import SequenceParallel

    ALL_PARALLEL_STYLES.register("heads", SequenceParallel(sequence_dim=2))
    model.tp_plan = {name: "heads" if name.endswith("_norm") else style for name, style in model.tp_plan.items()}
    spread_by_transformers(model, mesh)


SPREADS = {"transformers": spread_by_transformers, "torch": spread_by_torch, "heads": spread_with_heads}


def register_ulysses(group: dist.ProcessGroup) -> str:
    """Name an attention of transformers that computes on this rank's part of each sequence."""

    def ulysses(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        assert mask is None
        scale, grouped = options["scaling"], query.shape[1] != key.shape[1]
        result = attention.ulysses(query, key, value, group, is_causal=True, scale=scale, enable_gqa=grouped)
        return result.transpose(1, 2), None

    transformers.AttentionInterface.register(ULYSSES, ulysses)
    transformers.AttentionMaskInterface.register(ULYSSES, lambda *args, **kwargs: None)
    return ULYSSES


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def batch(number: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(4, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return {"input_ids": tokens[:, :-1], "position_ids": positions}, tokens[:, 1:]


def part(given: tuple[dict[str, Tensor], Tensor], group: dist.ProcessGroup | None) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's tokens of a batch along `cp`."""
    if group is None:
        return given
    kwargs, target = given
    return {name: attention.sequence_part(each, group) for name, each in kwargs.items()}, attention.sequence_part(target, group)


def example(given: tuple[dict[str, Tensor], Tensor]) -> graphpp.Microbatch:
    rows, (kwargs, target) = ROWS // MICROBATCHES, given
    return graphpp.Microbatch((), {name: each[:rows] for name, each in kwargs.items()}, target[:rows])


@dataclass
class Trained:
    """By step the norm of all gradients; at the end the whole parameters that the rank's stages have, by FQN."""

    norms: list[Tensor] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def optimizer_of(parameters: Any, kind: str) -> torch.optim.Optimizer:
    """SGD moves a parameter in proportion to its gradient. AdamW turns the rounding of a gradient that is nearly zero, such as
    that of a word that hardly matters, into a step of full length, unless its `eps` is larger than such a gradient."""
    if kind == "adamw":
        return torch.optim.AdamW(list(parameters), lr=1e-3, eps=1e-5, foreach=False)
    return torch.optim.SGD(list(parameters), lr=0.5, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A model, how its layers are spread, and the options of one training."""

    options: Mapping[str, Any]
    by: str = "transformers"
    model: str = "llama"
    optimizer: str = "sgd"


def train_on_mesh(rank: int, mesh: Mesh, cases: Sequence[Case]) -> list[Trained]:
    """Train in each of several ways, with each replica on batches of its own, which the ranks of `cp` share."""
    torch.set_num_threads(1)
    made = mesh.made()
    return [_trained(made, mesh, mesh.replica(rank) // mesh.size("cp"), case) for case in cases]


def _trained(made: DeviceMesh, mesh: Mesh, replica: int, case: Case) -> Trained:
    context = made.get_group("cp") if "cp" in mesh.names else None
    model = language_model(case.model, register_ulysses(context) if context is not None else None)
    if "tp" in mesh.names:
        SPREADS[case.by](model, made["tp"])
    options = {"microbatches": MICROBATCHES, **case.options}
    pipe = graphpp.compile(model, loss, example=example(part(batch(0), context)), mesh=made, **options)
    return trained(pipe, replica, context, case.optimizer)


def trained(pipe: graphpp.Pipeline, replica: int, context: dist.ProcessGroup | None, kind: str) -> Trained:
    optimizer, found = optimizer_of(pipe.parameters(), kind), Trained()
    for number in range(STEPS):
        kwargs, target = part(batch(100 * number + replica), context)
        pipe.step(target=target, **kwargs)
        found.norms.append(pipe.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    found.params.update({fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()})
    return found


def train_alone(replicas: int, name: str = "llama", kind: str = "sgd") -> Trained:
    """The same training by autograd and a loop over the microbatches of all replicas, without graphpp."""
    return trained_alone(language_model(name), replicas, kind)


def trained_alone(model: nn.Module, replicas: int, kind: str) -> Trained:
    found = Trained()
    optimizer = optimizer_of(model.parameters(), kind)
    for number in range(STEPS):
        for replica in range(replicas):
            kwargs, target = batch(100 * number + replica)
            cut = [each.chunk(MICROBATCHES) for each in (*kwargs.values(), target)]
            for *values, labels in zip(*cut, strict=True):
                output = model(**dict(zip(kwargs, values, strict=True)))
                (loss(output, labels) / MICROBATCHES / replicas).backward()
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    found.params.update({fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()})
    return found
