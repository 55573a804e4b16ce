"""Packed rows: several documents in a row, with other lengths and another number of documents in each microbatch.

Attention within the documents is one operator. A step has the numbers of a plain loop over the microbatches, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import graphpp
from graphpp import attention
from graphpp.errors import GraphPPError
from graphpp.integrations.transformers import PipelineTrainer
from graphpp.passes.graph.op_costs import flops
from tests import internals
from tests.distributed import DEVICE, run_ranks
from tests.exhaustive import further

WORDS, STEPS = 19, 3
LENGTHS = [[3, 5, 1], [9], [0, 4, 0, 5, 0], [60, 37, 20]]


class Block(nn.Module):

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.group = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 8), group

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in self.qkv(self.norm(x)).split([8, 4, 4], -1))
        if self.group is None:
            mixed = attention.packed(q, k, v, cu_seqlens, max_seqlen, is_causal=True)
        else:
            options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "is_causal": True}
            mixed = attention.ulysses(q, k, v, self.group, attention.packed, **options)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Reads tokens and positions [1, tokens]. `group`: of the ranks that share each row."""

    def __init__(self, layers: int = 4, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, 8), nn.Embedding(64, 8)
        self.layers = nn.ModuleList(Block(group) for _ in range(layers))
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
        return self.head(x)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[0], labels[0], ignore_index=-100)


def loss_per_token(logits: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, count = target
    return F.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum") / count


class Row(NamedTuple):
    tokens: Tensor  # [1, tokens], as are positions and labels
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    labels: Tensor

    @property
    def valid(self) -> int:
        return int((self.labels != -100).sum())


def row(lengths: list[int], seed: int, valid: int | None = None) -> Row:
    """`valid`: how many tokens have a label; None for all but the last of each document."""
    tokens = torch.randint(WORDS, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    labels = tokens.roll(-1, 1)
    labels[0, cu_seqlens[1:].long() - 1] = -100
    if valid is not None:
        labels[0, valid:] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return Row(tokens, positions, cu_seqlens, max(lengths), labels)


def rows(step: int, count: int = 4) -> list[Row]:
    """Rows of 1 to 5 documents; the second has no valid token, the third a single one."""
    generator = torch.Generator().manual_seed(step)
    draw = lambda most: int(torch.randint(1, most, (), generator=generator))  # noqa: E731
    lengths = [[draw(9) + 1 for _ in range(draw(6))] for _ in range(count)]
    return [row(each, 100 * step + at, {1: 0, 2: 1}.get(at)) for at, each in enumerate(lengths)]


class Steps(NamedTuple):
    losses: list[Tensor]
    grads: list[dict[str, Tensor]]
    captures: int = 0


def share(data: list[Row], of: list[Row]) -> Tensor:
    """The share of each row in all valid tokens."""
    return torch.tensor([float(each.valid) for each in data]) / sum(each.valid for each in of)


def microbatch(each: Row, target: Any) -> graphpp.Microbatch:
    return graphpp.Microbatch(each[:2], {"cu_seqlens": each.cu_seqlens, "max_seqlen": each.max_seqlen}, target)


def plain(model: nn.Module, weighted: bool, steps: int, count: int = 4) -> Steps:
    found = Steps([], [])
    for step in range(steps):
        data, losses = rows(step, count), list[Tensor]()
        for each, weight in zip(data, share(data, data).tolist(), strict=True):
            logits = model(*each[:4])
            total = sum(other.valid for other in data)
            losses.append(mean_loss(logits, each.labels) if weighted else loss_per_token(logits, (each.labels, total)))
            if each.valid:
                (losses[-1] * weight if weighted else losses[-1]).backward()
        found.losses.append(torch.stack(losses).detach())
        found.grads.append({fqn: each.grad.clone() for fqn, each in model.named_parameters() if each.grad is not None})
        model.zero_grad()
    return found


def on_rank(rank: int, weighted: bool, steps: int, count: int, layers: int, options: dict[str, Any]) -> Steps:
    torch.set_num_threads(1)
    loss: Any = mean_loss if weighted else loss_per_token
    found = Steps([], [])
    with internals.captures() as made:
        pipe = graphpp.compile(Decoder(layers), loss, gradients="sum", microbatches=count, **options)
        for step in range(steps):
            data = rows(step, count)
            total = sum(each.valid for each in data)
            parts = [microbatch(each, each.labels if weighted else (each.labels, total)) for each in data]
            result = pipe.step_microbatches(parts, loss_weight=share(data, data) if weighted else None)
            assert result.loss.isfinite()
            found.losses.append(result.losses)
            found.grads.append({fqn: each.grad.clone() for fqn, each in pipe.named_parameters()})
            pipe.zero_grad()
    return found._replace(captures=len(made))


OPTIONS: list[tuple[int, bool, dict[str, Any]]] = [
    (2, True, {"schedule": "ZBVZeroBubble", "split": 4, "memory": "full"}),
    *((2, False, {"schedule": name, "split": 4}) for name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")),
    (2, False, {"schedule": "1F1B", "split": 2}),
    (2, True, {"schedule": "1F1B", "split": 2, "memory": "full"}),
    (2, False, {"schedule": "DualPipeV", "split": 4, "memory": "full"}),
    (4, False, {"schedule": "1F1B", "split": 4}),
    *((4, True, {"schedule": name, "split": 8}) for name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")),
]


@pytest.mark.parametrize(("ranks", "weighted", "options"), [OPTIONS[0], *further(*OPTIONS[1:])])
def test_a_step_over_packed_rows_is_a_plain_loop(ranks: int, weighted: bool, options: dict[str, Any]) -> None:
    """Weighted by loss_weight, or by a sum of losses over the step's count of valid tokens."""
    count, layers = 2 * ranks, 2 * ranks
    expected = plain(Decoder(layers), weighted, STEPS, count)
    found = run_ranks(on_rank, ranks, weighted, STEPS, count, layers, options)
    for step in range(STEPS):
        grads = {fqn: grad for each in found for fqn, grad in each.grads[step].items()}
        assert grads.keys() == expected.grads[step].keys()
        assert [fqn for fqn, grad in grads.items() if not torch.equal(grad, expected.grads[step][fqn])] == []
        for each in found:
            torch.testing.assert_close(each.losses[step], expected.losses[step], rtol=0, atol=0, equal_nan=True)
    assert expected.losses[0][1].isnan() == weighted  # the mean over no token


@pytest.mark.exhaustive
def test_captures_stay_few_for_many_lengths() -> None:
    """Each graph with open sizes is captured a second time, for one size, to compare both."""
    (found,) = run_ranks(on_rank, 1, False, 20, 4, 4, {"split": 2})
    expected = plain(Decoder(), False, 20)
    assert all(map(torch.equal, found.losses, expected.losses))
    assert found.captures <= 4


def sharded(rank: int) -> Steps:
    torch.set_num_threads(1)
    mesh = init_device_mesh(DEVICE.type, (1, 2), mesh_dim_names=("pp", "dp_shard"))
    pipe, found = graphpp.compile(Decoder(), mean_loss, split=2, mesh=mesh, gradients="sum", microbatches=2), Steps([], [])
    for step in range(STEPS):
        data = rows(step)
        own = data[2 * rank : 2 * rank + 2]
        parts = [microbatch(each, each.labels) for each in own]
        found.losses.append(pipe.step_microbatches(parts, loss_weight=2 * share(own, data)).losses)  # gradients are averaged
        found.grads.append({fqn: each.grad.full_tensor() for fqn, each in pipe.named_parameters()})
        pipe.zero_grad()
    return found


@pytest.mark.exhaustive
def test_replicas_with_shards_take_rows_of_their_own_lengths() -> None:
    expected, found = plain(Decoder(), True, STEPS), run_ranks(sharded, 2)
    for step in range(STEPS):
        losses = torch.cat([each.losses[step] for each in found])
        torch.testing.assert_close(losses, expected.losses[step], rtol=0, atol=0, equal_nan=True)
        for each in found:
            torch.testing.assert_close(each.grads[step], expected.grads[step], rtol=1e-5, atol=1e-7)


def shared(rank: int) -> list[Steps]:
    torch.set_num_threads(1)
    mesh = init_device_mesh(DEVICE.type, (1, 2), mesh_dim_names=("pp", "cp"))
    group = mesh.get_group("cp")
    pipe = graphpp.compile(Decoder(group=group), mean_loss, split=2, mesh=mesh, gradients="sum", microbatches=2)
    found = Steps([], [])
    for step, lengths in enumerate([[3, 5], [6, 1, 4, 1], [10]]):
        data = [row(lengths, step), row([4, *lengths], 7 + step)]
        cut = [each._replace(**{name: attention.sequence_part(getattr(each, name), group) for name in PARTS}) for each in data]
        parts = [microbatch(each, each.labels) for each in cut]
        found.losses.append(pipe.step_microbatches(parts, loss_weight=2 * share(cut, data)).losses)
        found.grads.append({fqn: each.grad.clone() for fqn, each in pipe.named_parameters()})
        pipe.zero_grad()
    return found


PARTS = ("tokens", "positions", "labels")


@pytest.mark.exhaustive
def test_ranks_share_packed_rows_by_ulysses() -> None:
    first, second = run_ranks(shared, 2)
    for step, lengths in enumerate([[3, 5], [6, 1, 4, 1], [10]]):
        model, data = Decoder(), [row(lengths, step), row([4, *lengths], 7 + step)]
        for each, weight in zip(data, share(data, data).tolist(), strict=True):
            (mean_loss(model(*each[:4]), each.labels) * weight).backward()
        expected = {fqn: each.grad for fqn, each in model.named_parameters()}
        for found in (first, second):
            torch.testing.assert_close(found.grads[step], expected, rtol=1e-5, atol=1e-7)


def documents(lengths: list[int], kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, sum(lengths), 16, generator=generator).to(dtype) for heads in (4, kv_heads, kv_heads, 4))


@pytest.mark.parametrize("dtype", [torch.float32, *further(torch.float64, torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_each_document_is_a_call_of_scaled_dot_product_attention(kv_heads: int, dtype: torch.dtype) -> None:
    for lengths in LENGTHS:
        for is_causal in (False, True):
            *operands, weight = documents(lengths, kv_heads, dtype)
            operands = [each.requires_grad_() for each in operands]
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            longest = max(lengths) if is_causal else None
            found = attention.packed(*operands, cu_seqlens, longest, is_causal=is_causal, scale=0.3)  # type: ignore[arg-type]
            q, k, v = operands[0], *(each.repeat_interleave(4 // kv_heads, 1) for each in operands[1:])
            each = [part for part in zip(*(every.split(lengths, 2) for every in (q, k, v)), strict=True) if part[0].numel()]
            expected = torch.cat([F.scaled_dot_product_attention(*part, is_causal=is_causal, scale=0.3) for part in each], 2)
            assert torch.equal(found, expected)
            grads = [torch.autograd.grad((output * weight).sum(), operands) for output in (found, expected)]
            assert all(map(torch.equal, *grads))


def test_two_rows_are_as_one() -> None:
    q, k, v, _ = documents([4, 6], 4, torch.float32)
    cu_seqlens = torch.tensor([0, 4, 5, 10], dtype=torch.int32)  # the second row is [5, 10)
    one = attention.packed(q, k, v, cu_seqlens)
    two = attention.packed(*(torch.cat(each.chunk(2, 2)) for each in (q, k, v)), cu_seqlens)
    assert torch.equal(torch.cat(two.chunk(2), 2), one)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "sizes": (lambda q, ends: attention.packed(q, q[:, :3], q[:, :3], ends), "or heads of key and value that divide query's"),
    "types": (lambda q, ends: attention.packed(q, q, q.double(), ends), "or heads of key and value that divide query's"),
    "ends": (lambda q, ends: attention.packed(q, q, q, ends.long()), r"cu_seqlens: take int32 \[documents \+ 1\] of one"),
    "no document": (lambda q, ends: attention.packed(q, q, q, ends[:1]), r"cu_seqlens: take int32 \[documents \+ 1\] of one"),
    "a part": (lambda q, ends: attention.packed(*[q[:, :, :7]] * 3, ends), "last the 7 tokens of the rows, .* call graphpp"),
    "longest": (lambda q, ends: attention.packed(q, q, q, ends, 5), "max_seqlen: the longest document has 6 tokens, got 5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    call, text = REFUSED[name]
    q, *_ = documents([4, 6], 4, torch.float32)
    with pytest.raises((GraphPPError, ValueError), match=text):
        call(q, torch.tensor([0, 4, 10], dtype=torch.int32))


def test_the_planner_counts_its_arithmetic() -> None:
    q, k, v, _ = documents([4, 6], 2, torch.float32)
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)

    def gradients(*operands: Tensor) -> Any:
        return torch.autograd.grad(attention.packed(*operands).sum(), operands[:3])

    graph = make_fx(gradients, tracing_mode="fake")(*(each.requires_grad_() for each in (q, k, v)), ends)
    products = [flops(node) for node in graph.graph.nodes if "packed_attention" in str(node.target)]
    one = 2 * 4 * 16 * 2 * 5 * 5  # two documents of five tokens, four heads, sixteen wide
    assert products == [2 * one, 5 * one]


def documents_of_transformers(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **given: Any) -> Any:
    ends, longest = given["cu_seq_lens_q"], given["max_length_q"]
    return attention.packed(query, key, value, ends, longest, is_causal=True, scale=given["scaling"]).transpose(1, 2), None


def transformer(kind: str, attention: str = "documents") -> PreTrainedModel:
    AttentionInterface.register("documents", documents_of_transformers)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    own = {"vocab_size": 64, "num_hidden_layers": 4, "use_cache": False, "attn_implementation": attention}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **own))


def collated(step: int) -> list[dict[str, Any]]:
    """Four rows of transformers' padding-free collator, and the number of labels of the step; the second row has no label."""
    generator = torch.Generator().manual_seed(step)
    draw = lambda most: int(torch.randint(1, most, (), generator=generator))  # noqa: E731
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    found = [collate([{"input_ids": [draw(64) for _ in range(draw(9))]} for _ in range(1 + draw(5))]) for _ in range(4)]
    found[1]["labels"].fill_(-100)
    count = sum(int((each["labels"][:, 1:] != -100).sum()) for each in found)
    return [{**each, "num_items_in_batch": count} for each in found]


def transformer_on_rank(rank: int, kind: str, attention: str, options: dict[str, Any]) -> Steps:
    torch.set_num_threads(1)
    model, found = transformer(kind, attention), Steps([], [])
    pipe = graphpp.compile(model, gradients="sum", microbatches=4, **options)
    for step in range(STEPS):
        found.losses.append(pipe.step_microbatches([graphpp.Microbatch((), each) for each in collated(step)]).losses)
        found.grads.append({fqn: each.grad.clone() for fqn, each in pipe.named_parameters()})
        pipe.zero_grad()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "attention", "schedule"),
    [
        ("llama", "documents", "ZBVZeroBubble"),
        ("llama", "sdpa", "1F1B"),  # equal to the bit for rows of several documents: transformers masks no row of one
        ("llama", "documents", "1F1B"),
        ("qwen3", "documents", "1F1B"),
        ("qwen3", "documents", "ZBVZeroBubble"),
    ],
)
def test_transformers_without_padding(kind: str, attention: str, schedule: str) -> None:
    """With the model's own loss, and its number of labels in the step."""
    options = {"schedule": schedule, "split": 2 if schedule == "1F1B" else 4}
    found, model = run_ranks(transformer_on_rank, 2, kind, attention, options), transformer(kind, attention)
    for step in range(STEPS):
        losses = [model(**each).loss for each in collated(step)]
        for each in losses:
            each.backward()
        assert all(torch.equal(each.losses[step], torch.stack(losses)) for each in found)
        for fqn, grad in (pair for each in found for pair in each.grads[step].items()):
            torch.testing.assert_close(grad, model.get_parameter(fqn).grad, rtol=0, atol=0)
        model.zero_grad()


@pytest.mark.exhaustive
def test_the_trainer_takes_the_collator_without_padding(tmp_path: Path) -> None:
    data = [{"input_ids": torch.randint(64, (1 + at % 9,)).tolist()} for at in range(24)]
    usual = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "logging_steps": 1, "num_train_epochs": 1}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    logs = []
    for kind, own in ((Trainer, {}), (PipelineTrainer, {"pipeline": {}})):
        args = TrainingArguments(str(tmp_path), **usual, **quiet)
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        trainer = kind(transformer("llama"), args, train_dataset=data, data_collator=collate, **own)
        trainer.train()
        logs.append([(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each])
    assert len(logs[0]) == 4 and logs[0] == logs[1]
