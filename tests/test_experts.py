"""Experts over ranks: the answers and gradients of a loop over all experts in one process, in eager and under schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

import graphpp
from graphpp.errors import GraphPPError
from graphpp.experts import routed
from graphpp.runtime.shards.local_rows import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh

EXPERTS, TOKENS, WIDTH, CHOICES = 4, 10, 6, 2


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and weights of a rank, the experts that they choose (the first one often), and the weights of all experts."""
    generator = torch.Generator().manual_seed(rank)
    tokens, weights = torch.randn(TOKENS, WIDTH, generator=generator), torch.rand(TOKENS, CHOICES, generator=generator)
    wanted = torch.randn(TOKENS, EXPERTS, generator=generator) + torch.tensor([2.0, 0, 0, 0])
    experts = torch.randn(EXPERTS, WIDTH, 3, generator=torch.Generator().manual_seed(99))
    return tokens.requires_grad_(), wanted.topk(CHOICES).indices, weights.requires_grad_(), experts.requires_grad_()


def looped(tokens: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor, capacity: int | None) -> Tensor:
    """The same by a loop over the tokens."""
    taken, rows = dict.fromkeys(range(EXPERTS), 0), []
    for token, choices, shares in zip(tokens, chosen.tolist(), weights, strict=True):
        row = torch.zeros(3)
        for expert, share in zip(choices, shares, strict=True):
            if capacity is None or taken[expert] < capacity:
                row = row + share * (token @ experts[expert])
            taken[expert] += 1
        rows.append(row)
    return torch.stack(rows)


def answered(rank: int, ranks: int, capacity: int | None) -> list[Tensor | None]:
    """A rank's output, and the gradients of its tokens, of its weights and of its experts."""
    torch.set_num_threads(1)
    tokens, chosen, weights, experts = inputs(rank)
    own = experts.detach().chunk(ranks)[rank].clone().requires_grad_()
    group = dist.group.WORLD if ranks > 1 else None
    out = routed(tokens, chosen, weights, lambda x: torch.bmm(x, own), EXPERTS, group, capacity=capacity)
    (out * out).sum().backward()
    return [out.detach(), tokens.grad, weights.grad, own.grad]


@pytest.mark.parametrize("capacity", [None, 3, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_and_gradients_are_those_of_a_loop(ranks: int, capacity: int | None) -> None:
    found = run_ranks(answered, ranks, ranks, capacity) if ranks > 1 else [answered(0, 1, capacity)]
    of_experts = []
    for rank, (out, *grads) in enumerate(found):
        tokens, chosen, weights, experts = inputs(rank)
        expected = looped(tokens, chosen, weights, experts, capacity)
        (expected * expected).sum().backward()
        of_experts.append(experts.grad)
        for mine, theirs in zip((out, *grads[:2]), (expected.detach(), tokens.grad, weights.grad), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    together = torch.cat([grads[3] for grads in found])
    torch.testing.assert_close(together, sum(of_experts), rtol=1e-5, atol=1e-6)


def test_a_token_that_chooses_an_expert_twice_is_not_dropped_without_a_word() -> None:
    tokens, _, weights, experts = inputs(0)
    twice = torch.ones(TOKENS, CHOICES, dtype=torch.int64)
    assert routed(tokens, twice, weights, lambda x: torch.bmm(x, experts), EXPERTS).isnan().any()


def refusals(rank: int) -> None:
    tokens, chosen, weights, _ = inputs(rank)
    group = dist.group.WORLD
    calls: list[Callable[[], object]] = [
        lambda: routed(tokens[0], chosen, weights, torch.relu, EXPERTS),
        lambda: routed(tokens, chosen[1:], weights[1:], torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, weights[:, :1], torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, chosen, torch.relu, EXPERTS),
        lambda: routed(tokens, chosen[:, :0], weights[:, :0], torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, weights, lambda x: (x, x), EXPERTS),  # type: ignore[arg-type,return-value]
        lambda: routed(tokens, chosen.float(), weights, torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, weights, torch.relu, EXPERTS + 1, group),
        lambda: routed(tokens, chosen, weights, lambda x: x[:, 1:], EXPERTS),
        lambda: routed(tokens, chosen, weights, torch.relu, EXPERTS, 3),  # type: ignore[arg-type]
        lambda: routed(tokens, chosen, weights, torch.relu, EXPERTS, capacity=0),
    ]
    for call in calls:
        with pytest.raises(GraphPPError):
            call()
    for wrong, number in ((chosen + EXPERTS, 2 * EXPERTS - 1), (chosen - 1, -1)):
        with pytest.raises(GraphPPError, match=f"chosen: take experts from 0 to 3, numbered over all ranks, got {number}$"):
            routed(tokens, wrong, weights, torch.relu, EXPERTS)
    with pytest.raises(GraphPPError, match=r"tokens: take .*flatten\(0, 1\).*, got a tensor \[2, 5, 6\] of torch.float32"):
        routed(tokens.unflatten(0, (2, 5)), chosen, weights, torch.relu, EXPERTS)


def test_wrong_arguments_are_refused() -> None:
    run_ranks(refusals, 2)


# ------------------------------------------------------------------------------------------------ models of transformers


def over_ranks(module: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The forward of a module of experts of transformers, whose weights are spread over `module.group`."""
    up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (module.gate_up_proj, module.down_proj))

    def compute(x: Tensor) -> Tensor:
        gate, values = torch.bmm(x, up.transpose(1, 2)).chunk(2, -1)
        return torch.bmm(module.act_fn(gate) * values, down.transpose(1, 2))

    return routed(tokens, chosen, weights.to(tokens.dtype), compute, module.num_experts, module.group)


def language_model(family: str, mesh: DeviceMesh | None) -> nn.Module:
    """A mixture of experts of transformers with a few layers, whose experts are spread over the ranks of `mesh`."""
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("over_ranks", over_ranks)
    common = dict(vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, use_cache=False)
    if family == "Mixtral":
        config = transformers.MixtralConfig(
            **common, intermediate_size=24, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16
        )
    else:
        config = transformers.DeepseekV3Config(
            **common, intermediate_size=24, moe_intermediate_size=12, num_key_value_heads=2, n_routed_experts=4, n_group=2,
            topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=8, max_position_embeddings=16,
        )  # fmt: skip
    config._experts_implementation = "over_ranks"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            module.group = None if mesh is None else mesh.get_group()
            for name in ("gate_up_proj", "down_proj") if mesh is not None else ():
                whole = getattr(module, name).detach()
                setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    return model


def next_token(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def trained(rank: int, family: str, mesh: Mesh | None, replicas: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Whole gradients, the norms and the losses of a few steps."""
    torch.set_num_threads(1)
    made = None if mesh is None else mesh.made()
    model = language_model(family, None if made is None else made["ep"])
    pipe = graphpp.compile(model, next_token, mesh=made, microbatches=4, **options)
    optimizer, found = None, dict[str, Tensor]()
    for step in range(2):
        for replica in range(replicas) if mesh is None else [mesh.replica(rank)]:
            generator = torch.Generator().manual_seed(100 * step + replica)
            tokens, target = (torch.randint(32, (4, 6), generator=generator) for _ in range(2))
            pipe.step(tokens, target=target, accumulation_steps=replicas if mesh is None else 1)
        optimizer = optimizer or torch.optim.SGD(pipe.parameters(), lr=0.1)
        found[f"norm {step}"] = pipe.clip_grad_norm_(0.5)
        gradients = {fqn: each.grad for fqn, each in pipe.named_parameters() if each.grad is not None}
        found |= {f"{fqn} {step}": whole_tensor(gradient).clone() for fqn, gradient in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("Mixtral", Mesh((2, 1, 2), ("pp", "dp_shard", "ep")), {"split": 4, "schedule": "Interleaved1F1B"}),
        *further(
            ("Mixtral", Mesh((2, 2), ("pp", "ep")), {"split": 4, "schedule": "ZBVZeroBubble"}),
            ("Mixtral", Mesh((2, 2), ("dp_shard", "ep")), {}),
            ("DeepSeek", Mesh((2, 2), ("pp", "ep")), {"split": 4, "schedule": "DualPipeV"}),
            ("DeepSeek", Mesh((2, 2, 2), ("pp", "dp_shard", "ep")), {"split": 2, "schedule": "1F1B"}),
        ),
    ],
)
def test_language_models_train_as_in_one_process(family: str, mesh: Mesh, options: dict[str, Any]) -> None:
    expected = trained(0, family, None, mesh.replicas, {})
    for found in run_ranks(trained, mesh.ranks, family, mesh, mesh.replicas, options):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
