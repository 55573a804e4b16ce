"""A head whose words are cut over the ranks of a pipeline (`memory.word_parts`): loss, gradients, state and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp
from graphpp.errors import CaptureError, GraphPPError, SplitError
from tests.distributed import run_ranks
from tests.exhaustive import further

WORDS, WIDTH, ROWS, LENGTH = 11, 4, 8, 3


class Decoder(nn.Module):
    def __init__(self, *, tied: bool = False, bias: bool = False, words: int = WORDS, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, WIDTH, padding_idx=1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(WIDTH, words, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(3)
    return Decoder(**options)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(words: int = WORDS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens, target = (torch.randint(words, (ROWS, LENGTH), generator=draw) for _ in range(2))
    target[0, :2] = target[3, 1] = -100
    return tokens, target


def in_one_process(parts: int, tied: bool, **options: Any) -> graphpp.Pipeline:
    """All stages in this process, the words in as many parts as the ranks have."""
    split, memory = 2 + parts * (1 + tied), graphpp.Memory(word_parts=parts)
    alone = dist.new_subgroups(1)[0] if dist.is_initialized() else None
    return graphpp.compile(decoder(tied=tied), loss, split=split, microbatches=4, memory=memory, mesh=alone, **options)


def whole(tensors: Any) -> dict[str, Tensor]:
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in tensors}


# ------------------------------------------------------------------------------------------------- in one process


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    words = (logits.float() * 0.5).flatten(0, 1)
    return F.cross_entropy(words, target.flatten(), label_smoothing=0.2, reduction="sum")


def other_index(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].clamp(min=0).flatten(), ignore_index=7)


@pytest.mark.parametrize("own", [loss, smoothed, other_index])
@pytest.mark.parametrize(("tied", "bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradients_are_those_of_the_whole_head(own: Any, tied: bool, bias: bool, parts: int) -> None:
    model, (tokens, target) = decoder(tied=tied, bias=bias), batch()
    pipe = graphpp.compile(
        model, own, split=2 + parts * (1 + tied), microbatches=4, memory=graphpp.Memory(word_parts=parts)
    )
    found = pipe.step(tokens, target=target).losses
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    losses = torch.stack([own(model(x), y) for x, y in zip(tokens.chunk(4), target.chunk(4), strict=True)])
    losses.mean().backward()
    torch.testing.assert_close(found, losses.detach())
    for name, each in model.named_parameters():
        torch.testing.assert_close(gradients[name], each.grad, msg=name)
    logits = pipe.eval(tokens).output
    torch.testing.assert_close(logits, model(tokens).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "tied"),
    [("Interleaved1F1B", True), ("ZBVZeroBubble", False), *further(("DualPipeV", False), ("InterleavedZeroBubble", True))],
)
def test_stages_compute_the_uncut_graph(schedule: str, tied: bool) -> None:
    tokens, target = batch()
    found = graphpp.verify(
        decoder(bias=True, tied=tied), loss, graphpp.Microbatch((tokens,), target=target), split=8 + 4 * tied,
        schedule=schedule, ranks=4, microbatches=8, memory=graphpp.Memory(word_parts=4, recompute="full"),
    )  # fmt: skip
    found.raise_if_wrong()
    assert found.cut.verdict == ("close" if tied else "equal")


def test_embedding_and_head_in_one_module_have_parts_of_their_own() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Parameter(torch.rand(WORDS, WIDTH))
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = F.embedding(tokens, self.words)
            for layer in self.layers:
                x = layer(x)
            return F.linear(x, self.words)

    tokens, target = batch()
    found = graphpp.verify(
        Shared(), loss, graphpp.Microbatch((tokens,), target=target), split=6, ranks=2, memory=graphpp.Memory(word_parts=2)
    )
    found.raise_if_wrong()
    assert [each.parameters for each in found.plan.stages] == [24, 20, 20, 20, 24, 20]


def test_transformers_with_tied_words_and_other_lengths() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=19, num_hidden_layers=2, use_cache=False, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config)
    pipe = graphpp.compile(model, split=6, microbatches=3, memory=graphpp.Memory(word_parts=2), gradients="sum")
    parts = [torch.randint(19, (1, length)) for length in (3, 6, 5)]
    rows = [graphpp.Microbatch((), {"input_ids": each, "labels": each, "num_items_in_batch": 11}) for each in parts]
    found = pipe.step_microbatches(rows).losses
    gradient = model.lm_head.weight.grad
    assert gradient is not None
    before = gradient.clone()
    model.zero_grad()
    losses = [model(input_ids=each, labels=each, num_items_in_batch=11).loss for each in parts]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(found, torch.stack(losses).detach())
    torch.testing.assert_close(before, model.lm_head.weight.grad)


def test_an_autocast_head_in_bfloat16_computes_its_softmax_in_float32() -> None:
    (tokens, target), model = batch(), decoder()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe = graphpp.compile(model, loss, split=4, microbatches=1, memory=graphpp.Memory(word_parts=2))
        found = pipe.step(tokens, target=target).loss
        expected = loss(model(tokens), target)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tied", "place", "word"), [(False, 1, WORDS), (False, 1, -1), (True, 0, -1), (True, 0, WORDS)])
def test_a_target_or_token_that_is_no_word_raises(tied: bool, place: int, word: int) -> None:
    pair = batch()
    pair[place][2, 0] = word
    with pytest.raises(IndexError, match="index out of range"):
        in_one_process(2, tied=tied).step(pair[0], target=pair[1])


def test_words_that_are_never_chosen_have_gradients_without_nan() -> None:
    """The second part of the words is padding: its bias is -inf."""
    model, (tokens, target) = decoder(bias=True), batch()
    with torch.no_grad():
        model.head.bias[6:] = -torch.inf
    pipe = graphpp.compile(model, loss, split=4, microbatches=1, memory=graphpp.Memory(word_parts=2))
    target = target.clamp(max=5)
    pipe.step(tokens, target=target)
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    loss(model(tokens), target).backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(found[name], each.grad, msg=name)


def test_of_two_heads_the_one_with_more_words_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    class Auxiliary(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.kind = nn.Linear(WIDTH, 5)

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = self.tokens(tokens)
            return self.kind(x), self.head(x)

    def both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return loss(output[0], target.clamp(max=4)) + loss(output[1], target)

    tokens, target = batch()
    pipe = graphpp.compile(Auxiliary(), both, split=3, microbatches=1, memory=graphpp.Memory(word_parts=2))
    pipe.step(tokens, target=target)
    assert [each.modules[-1] for each in pipe.plan.stages][1:] == ["head.words[0]", "head.words[1]"]
    assert "still has a whole head" in caplog.text and "another head has more words" in caplog.text


def step(model: nn.Module, own: Any = loss, words: int = WORDS, **options: Any) -> None:
    tokens, target = batch(words)
    memory = graphpp.Memory(**{"word_parts": 2, **options.pop("memory", {})})
    graphpp.compile(model, own, microbatches=4, memory=memory, **{"split": 4, **options}).step(tokens, target=target)


class TwoHeads(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return torch.stack([self.head(x), self.head(2 * x)])


def both(logits: Tensor, target: Tensor) -> Tensor:
    return loss(logits[0], target) + loss(logits[1], target)


def with_metric(logits: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return loss(logits, target), {"right": (logits.argmax(-1) == target).float().mean()}


REFUSED: dict[str, tuple[Callable[[], object], type[GraphPPError], str]] = {
    "another loss": (lambda: step(decoder(), lambda out, _: out.pow(2).mean()), CaptureError, "no cross entropy over a linear"),
    "a metric of the logits": (lambda: step(decoder(), with_metric), CaptureError, r"parts.py:\d+ the logits are read by"),
    "two heads": (lambda: step(TwoHeads(), both), CaptureError, "aten.select.int stands between a linear layer and"),
    "few words": (lambda: step(decoder(words=3), words=3, memory={"word_parts": 4}, split=6), CaptureError, "3 words cannot"),
    "logits_tokens too": (lambda: step(decoder(), memory={"logits_tokens": 2}), CaptureError, "leave one of them out"),
    "no room for the layers": (lambda: step(decoder(tied=True)), SplitError, "2 parts of its embedding"),
    "an evaluation first": (lambda: in_one_process(2, tied=False).eval(batch()[0]), CaptureError, "or train a step first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    attempt, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        attempt()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1F1B"}, "stages in all: 2. Ask for more, such as split=4"),
        ({"split": 4, "memory": graphpp.Memory(word_parts=3)}, "the pipeline has 2 ranks"),
        ({"split": ["layers.2", "layers.3", "head.words[0]"]}, r"stage 3 on rank 1 has head.weight\[0:6\], which belongs on"),
        ({"split": graphpp.Layout("Et|t|t|tL", ranks=2)}, "a Layout, which knows no parts of words"),
    ],
)
def test_a_split_that_gives_a_rank_another_part_is_refused(options: dict[str, Any], message: str) -> None:
    tokens, target = batch()
    given = {"memory": graphpp.Memory(word_parts=2), **options}
    with pytest.raises(SplitError, match=message):
        graphpp.verify(decoder(), loss, graphpp.Microbatch((tokens,), target=target), ranks=2, **given)


# ------------------------------------------------------------------------------------------------- on ranks


class Trained(NamedTuple):
    """Losses and gradients of each step, the norms, and the weights after the last step."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    norms: list[Tensor]
    weights: dict[str, Tensor]


def grads(pipe: graphpp.Pipeline) -> list[tuple[str, Tensor]]:
    return [(name, each.grad) for name, each in pipe.named_parameters() if each.grad is not None]


def train(pipe: graphpp.Pipeline, rows: slice) -> Trained:
    losses, gradients, norms, optimizer = [], [], [], None
    tokens, target = (each[rows] for each in batch())
    for _ in range(2):
        losses.append(pipe.step(tokens, target=target).losses)
        optimizer = optimizer or torch.optim.AdamW(pipe.parameters(), 0.1, foreach=False)
        gradients.append(whole((name, grad.clone()) for name, grad in grads(pipe)))
        norms.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, gradients, norms, pipe.gather(rank=None))


def on_ranks(rank: int, tied: bool, options: dict[str, Any]) -> list[Trained]:
    memory = graphpp.Memory(word_parts=dist.get_world_size())
    pipe = graphpp.compile(decoder(tied=tied), loss, microbatches=4, memory=memory, **options)
    both = [train(pipe, slice(None)), train(in_one_process(dist.get_world_size(), tied), slice(None))]
    head: Any = dict(pipe.named_parameters())["tokens.weight" if tied else "head.weight"]
    assert head.shape[0] == WORDS
    assert head.to_local().shape[0] < WORDS
    return both


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {"split": 4}),
        (False, {"split": "auto", "schedule": "Interleaved1F1B"}),
        (True, {"split": 6, "schedule": "InterleavedZeroBubble"}),
        (False, {"schedule": "ZBVZeroBubble"}),
        *further((True, {"split": 6, "schedule": "LoopedBFS"})),
    ],
)
def test_ranks_train_as_one_process(tied: bool, options: dict[str, Any]) -> None:
    for found, expected in run_ranks(on_ranks, 2, tied, options):
        if options.get("schedule") == "ZBVZeroBubble":  # adds the parts in another order
            torch.testing.assert_close(found.losses, expected.losses)
            torch.testing.assert_close(found.norms, expected.norms)
            continue
        assert torch.equal(found.losses[0], expected.losses[0])
        torch.testing.assert_close(found.losses[1], expected.losses[1])  # the norm may round otherwise, and so the clipped step
        torch.testing.assert_close(found.norms, expected.norms)
        assert all(torch.equal(each, expected.gradients[0][name]) for name, each in found.gradients[0].items())
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-5)


def on_mesh(rank: int, dimension: str, tied: bool, keep: int | None) -> tuple[Trained, Trained]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", dimension))
    parallel = graphpp.Parallel(keep=keep)
    half, number = ROWS // 2, mesh[dimension].get_local_rank()
    pipe = graphpp.compile(
        decoder(tied=tied), loss, split=4 + 2 * tied, schedule="Interleaved1F1B", microbatches=2, mesh=mesh,
        memory=graphpp.Memory(word_parts=2), parallel=parallel,
    )  # fmt: skip
    return train(pipe, slice(number * half, number * half + half)), train(in_one_process(2, tied), slice(None))


@pytest.mark.parametrize(
    ("dimension", "tied", "keep"),
    [
        ("dp_shard", True, 0),
        *further(("dp_replicate", True, None), ("cp", False, None), ("dp_shard", False, None), ("dp_shard", False, 1)),
    ],
)
def test_replicas_and_shards_train_as_one_process(dimension: str, tied: bool, keep: int | None) -> None:
    for found, expected in run_ranks(on_mesh, 4, dimension, tied, keep):
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-5)


def two_pipelines(rank: int) -> str:
    model, (tokens, target) = decoder(), batch()
    plain = graphpp.compile(model, loss, split=2, microbatches=4, memory=graphpp.Memory(release=False))
    cut = graphpp.compile(model, loss, split=4, microbatches=4, memory=graphpp.Memory(word_parts=2, release=False))
    cut.step(tokens, target=target)
    with pytest.raises(GraphPPError, match=r"another pipeline has sharded head\.weight over its ranks"):
        plain.eval(tokens)
    with pytest.raises(GraphPPError, match=r"another pipeline has sharded head\.weight over its ranks"):
        graphpp.compile(model, loss, split=2)
    other = decoder()
    again = graphpp.compile(other, loss, split=4, microbatches=4, memory=graphpp.Memory(word_parts=2))
    if rank == 1:
        other.head.weight.grad = torch.zeros_like(other.head.weight)
    with pytest.raises(GraphPPError, match=r"head\.weight has a gradient" if rank else "rank 1"):
        again.step(tokens, target=target)
    other.zero_grad()
    return str(again.step(tokens, target=target).loss.item())


def test_other_objects_in_the_place_of_the_head_are_refused() -> None:
    first, second = run_ranks(two_pipelines, 2)
    assert first == second


def saved(rank: int, folder: Path) -> None:
    memory, (tokens, target) = graphpp.Memory(word_parts=2), batch()
    options: dict[str, Any] = {"split": 4, "microbatches": 4, "memory": memory}
    pipe = graphpp.compile(decoder(), loss, **options)
    pipe.step(tokens, target=target)
    optimizer = torch.optim.AdamW(pipe.parameters(), 0.1, foreach=False)
    optimizer.step()
    pipe.checkpoint(optimizer).save(folder / "checkpoint")
    pipe.save_weights(folder / "weights")
    expected = pipe.gather(rank=None)
    following = pipe.step(tokens, target=target).loss

    alone = dist.new_subgroups(1)[0]
    plain = graphpp.compile(decoder().requires_grad_(True), loss, split=2, microbatches=4, mesh=alone)
    plain.step(tokens, target=target)
    other = torch.optim.AdamW(plain.parameters(), 0.3)
    plain.checkpoint(other).load(folder / "checkpoint")
    assert all(torch.equal(each, expected[name]) for name, each in plain.state_dict().items())
    assert torch.equal(other.state_dict()["state"][0]["step"], torch.tensor(1.0))
    torch.testing.assert_close(plain.step(tokens, target=target).loss, following)

    with torch.device("meta"):
        blank = Decoder()
    again = graphpp.compile(blank, loss, example=graphpp.Microbatch((tokens[:2],), target=target[:2]), **options)
    again.materialize(weights=folder / "weights")
    assert all(torch.equal(each, expected[name]) for name, each in again.gather(rank=None).items())
    assert torch.equal(again.step(tokens, target=target).loss, following)


def test_weights_and_checkpoints_are_those_of_a_whole_head(tmp_path: Path) -> None:
    run_ranks(saved, 2, tmp_path)
