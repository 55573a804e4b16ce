"""`flex_attention` of torch: block masks in the arguments and in the forward, and trained tensors that `score_mod` captures.

A step has the numbers of a plain loop over the microbatches, bit for bit; the loop calls torch's function unfused on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils
from transformers.integrations import flex_attention as of_transformers

import graphpp
from graphpp._torch.operators import flex_attention as operators
from graphpp.batch.batch_dims import BatchDims
from graphpp.batch.cut_batch import BatchCutter
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.errors import BatchError, CaptureError
from graphpp.passes.graph.op_costs import flops
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further

WORDS, TOKENS, STEPS = 19, 10, 2
pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile",
    "ignore:_compile flag on create_block_mask",  # of transformers, as is the next
    "ignore:torch.compile is ignored when called inside torch.export region",
)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def within_documents(documents: Tensor) -> Callable[..., Tensor]:
    """`documents` [rows, tokens]: the document of each token."""

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    return mask_mod


def block_mask(mask_mod: Any, rows: int | None = None, heads: int | None = None, size: int = 4) -> BlockMask:
    """Blocks of `size`, of which the tokens are no multiple."""
    return create_block_mask(mask_mod, rows, heads, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=size)


Attend = Callable[..., Tensor]


def with_trained_bias(layer: Layer, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """ALiBi with the slopes of a buffer, and a bias by distance that is trained; two heads share one of key and value."""
    slopes, bias = layer.slopes, layer.bias * 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * bias[h, 0] - slopes[h] * (i - j) + bias[h, (i - j).clamp(0, 6) + 1]

    return flex_attention(q, k, v, score_mod, mask, enable_gqa=True)


class Layer(nn.Module):
    slopes: Tensor

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.norm, self.qkv, self.out = attend, nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.bias, self.scale = nn.Parameter(torch.rand(4, 8)), nn.Parameter(torch.ones(()))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.1]))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in self.qkv(self.norm(x)).split([8, 4, 4], -1))
        return x + self.out(self.attend(self, q, k, v, mask).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Reads tokens [rows, tokens] and a mask, or the documents from which the forward makes one."""

    def __init__(self, attend: Attend = with_trained_bias, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(layers))

    def forward(self, tokens: Tensor, mask: BlockMask | Tensor) -> Tensor:
        x = self.tokens(tokens)
        if isinstance(mask, Tensor):
            mask = create_block_mask(within_documents(mask), len(mask), None, TOKENS, TOKENS, device=mask.device, BLOCK_SIZE=4)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


MASKS: dict[str, Callable[[Tensor], Any]] = {  # of the documents of a batch or microbatch
    "argument": lambda documents: block_mask(within_documents(documents), len(documents)),
    "forward": lambda documents: documents,
    "broadcast": lambda documents: block_mask(causal),
    "heads": lambda documents: block_mask(of_heads(documents), len(documents), 4),
    "default size": lambda documents: block_mask(within_documents(documents), len(documents), None, 128),
    "partial": lambda documents: block_mask(functools.partial(windowed, 7, documents), len(documents)),
    "conjunction": lambda documents: block_mask(and_masks(causal, within_documents(documents)), len(documents)),
}


def of_heads(documents: Tensor) -> Callable[..., Tensor]:
    window, within = torch.tensor([2, 3, 5, 10]), within_documents(documents)
    return lambda b, h, i, j: within(b, h, i, j) & (i - j < window[h])


def windowed(window: int, documents: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j < window) & within_documents(documents)(b, h, i, j)


class Batch(NamedTuple):
    tokens: Tensor  # [rows, tokens], as are documents and labels
    documents: Tensor
    labels: Tensor

    def parts(self, sizes: list[int]) -> list[Batch]:
        return [Batch(*part) for part in zip(*(each.split(sizes) for each in self), strict=True)]


def batch(step: int, rows: int = 4) -> Batch:
    """Other documents in each step."""
    draw = functools.partial(torch.randint, size=(rows, TOKENS), generator=torch.Generator().manual_seed(step))
    return Batch(draw(WORDS), draw(2).cumsum(1) // 2, draw(WORDS))


Numbers = list[tuple[Tensor, dict[str, Tensor]]]  # of each step: losses of the microbatches, gradients


def plain(model: nn.Module, kind: str, rows: int, sizes: list[int]) -> Numbers:
    found = []
    for step in range(STEPS):
        losses = []
        for part in batch(step, rows).parts(sizes):
            with operators.trains_on_cpu():
                losses.append(loss(model(part.tokens, MASKS[kind](part.documents)), part.labels))
            (losses[-1] / len(sizes)).backward()
        grads = {fqn: each.grad.clone() for fqn, each in model.named_parameters() if each.grad is not None}
        found.append((torch.stack(losses).detach(), grads))
        model.zero_grad()
    return found


def trained(kind: str, rows: int, sizes: list[int], options: dict[str, Any], model: nn.Module) -> Numbers:
    """The whole batch in `pipe.step`; under 1F1B of several ranks, microbatches one by one."""
    pipe, found = graphpp.compile(model, loss, microbatches=len(sizes), **options), []
    for step in range(STEPS):
        data = batch(step, rows)
        if options.get("schedule") == "1F1B":
            parts = [((part.tokens, MASKS[kind](part.documents)), part.labels) for part in data.parts(sizes)]
            result = pipe.step_microbatches([graphpp.Microbatch(args, {}, labels) for args, labels in parts])
        else:
            result = pipe.step(data.tokens, MASKS[kind](data.documents), target=data.labels)
        named = pipe.named_parameters()
        found.append((result.losses, {fqn: each.grad.clone() for fqn, each in named if each.grad is not None}))
        pipe.zero_grad()
    data = batch(0, rows)
    assert torch.isfinite(pipe.eval(data.tokens, MASKS[kind](data.documents), target=data.labels).loss)
    return found


def on_rank(rank: int, kind: str, rows: int, sizes: list[int], options: dict[str, Any], attend: Attend, layers: int) -> Numbers:
    torch.set_num_threads(1)
    with internals.captures() as made:
        found = trained(kind, rows, sizes, options, Decoder(attend, layers))
    assert bool(made) == (rank == 0)  # the other rank gets the graph as data
    return found


def check(
    kind: str,
    sizes: list[int],
    options: dict[str, Any],
    ranks: int = 1,
    attend: Attend = with_trained_bias,
    layers: int = 4,
    tolerance: float = 0.0,
) -> None:
    rows = sum(sizes)
    given = (kind, rows, sizes, options, attend, layers)
    found = [on_rank(0, *given)] if ranks == 1 else run_ranks(on_rank, ranks, *given)
    for step, (losses, expected) in enumerate(plain(Decoder(attend, layers), kind, rows, sizes)):
        grads = {fqn: grad for each in found for fqn, grad in each[step][1].items()}
        torch.testing.assert_close(grads, expected, rtol=tolerance, atol=tolerance)
        for each in found:
            torch.testing.assert_close(each[step][0], losses, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "sizes"), [("argument", [2, 2]), *further(
    ("argument", [3, 2]), ("forward", [2, 2]), ("broadcast", [2, 2]), ("broadcast", [1, 1]),
    *((kind, [2, 1]) for kind in ("heads", "default size", "partial", "conjunction")),
)])  # fmt: skip
def test_a_whole_batch_is_cut_with_its_mask(kind: str, sizes: list[int]) -> None:
    check(kind, sizes, {"split": 2})


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("argument", {"schedule": "ZBVZeroBubble", "split": 4, "memory": "full"}),
    *((kind, {"schedule": "DualPipeV", "split": 4}) for kind in ("argument", "forward")),
    *((kind, {"schedule": "1F1B", "split": 2, "memory": "full"}) for kind in ("argument", "forward")),
    ("argument", {"schedule": "Interleaved1F1B", "split": 4}),
    ("forward", {"schedule": "ZBVZeroBubble", "split": 4}),
]


@pytest.mark.parametrize(("kind", "options"), [SCHEDULES[0], *further(*SCHEDULES[1:])])
def test_every_stage_of_two_ranks_gets_the_mask(kind: str, options: dict[str, Any]) -> None:
    check(kind, [1] * 4, options, ranks=2)


def with_sums(layer: Layer, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    output, sums = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3, return_lse=True)
    return output * (sums - layer.scale).sigmoid()[..., None]


def compiled(layer: Layer, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """The plain loop calls it uncompiled, as Inductor has no backward on the CPU."""
    call = torch.compile(flex_attention) if torch.compiler.is_exporting() else flex_attention
    return call(q, k, v, block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("attend", [with_sums, *further(compiled)])
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_other_calls(attend: Attend) -> None:
    check("argument", [2, 2], {"split": 2}, attend=attend, layers=2)


def test_a_compiler_on_another_device_gets_the_operators_with_their_bodies() -> None:
    """On the CPU by a patch: graphpp leaves the operators out of its regions there."""
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes if flops(node) and node.op == "call_function")
        return module

    with patch.object(operators, "is_fused", lambda node: node.target in (operators.FORWARD, operators.BACKWARD)):
        check("argument", [2, 2], {"split": 2, "backend": backend}, layers=2, tolerance=1e-5)
    assert {"flex_attention", "flex_attention_backward"} <= set(seen)


@pytest.mark.exhaustive
def test_inductor_compiles_all_but_the_attention_on_the_cpu() -> None:
    check("argument", [2, 2], {"split": 2, "backend": "inductor"}, tolerance=1e-5)


def test_the_verifier_runs_eager_on_the_cpu() -> None:
    data = batch(0)
    example = graphpp.Microbatch((data.tokens, MASKS["argument"](data.documents)), {}, data.labels)
    graphpp.verify(Decoder(layers=2), loss, example, split=2).raise_if_wrong()


REFUSED_SCORES: dict[str, tuple[Callable[[Layer, Tensor, Tensor], Tensor], str]] = {
    "no index": (lambda layer, score, h: score * layer.scale, r"tensor layers\.0\.scale without an index"),
    "made": (lambda layer, score, h: score + torch.tensor([0.1, 0.2, 0.3, 0.4])[h], "makes a tensor out of numbers"),
}


@pytest.mark.parametrize("name", REFUSED_SCORES)
def test_scores_that_cannot_be_captured_are_refused(name: str) -> None:
    change, text = REFUSED_SCORES[name]

    def attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, lambda score, b, h, i, j: change(layer, score, h), mask, enable_gqa=True)

    model, data, mask = Decoder(attend, 1), batch(0), MASKS["broadcast"]
    pipe = graphpp.compile(model, loss, split=1, microbatches=1)
    try:
        pipe.step(data.tokens, mask(data.documents), target=data.labels)
    except CaptureError as error:
        assert re.search(rf"'layers\.0' at .*test_flex.* {text}", str(error))
        return
    assert name == "no index"
    scale = model.layers[0].scale
    gradient, step = scale.grad.clone(), 1e-2
    with torch.no_grad():
        above, below = (loss(model(data.tokens, mask(data.documents)), data.labels) for _ in map(scale.add_, (step, -2 * step)))
    torch.testing.assert_close((above - below) / (2 * step), gradient, rtol=0.05, atol=1e-4)


SHARED = torch.zeros(4, TOKENS, dtype=torch.long)


class Window:
    size = 4

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i - j < 4


WINDOW = Window()
internals.WINDOW = 4  # type: ignore[attr-defined]


def bound(add: Callable[..., Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


TRAINED = nn.Parameter(torch.zeros(TOKENS))


def with_attribute(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i - j < 4


with_attribute.window = 4  # type: ignore[attr-defined]


def recursive(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return recursive(b, h, i, j) if TOKENS < 0 else i >= j


REFUSED: dict[str, tuple[Callable[[], BlockMask], str]] = {
    "object": (lambda: block_mask(Window()), "mask_mod is of the type Window: .* closes over tensors, .* config.window"),
    "captured": (lambda: block_mask(and_masks(causal, Window())), "mask_mod: mask_mods is of the type Window"),
    "global object": (lambda: block_mask(lambda b, h, i, j: (i >= j) & WINDOW(b, h, i, j)), "mask_mod: WINDOW is of the type"),
    "module": (lambda: block_mask(lambda b, h, i, j: i - j < internals.WINDOW), "is the module tests.internals, .* before def"),
    "class": (lambda: block_mask(lambda b, h, i, j: i - j < Window.size), "is the class Window, whose attributes"),
    "function": (lambda: block_mask(with_attribute), "has the attribute with_attribute.window"),
    "method": (lambda: block_mask(functools.partial(bound, torch.arange(TOKENS).add)), "is of the type builtin_func"),
    "recursive": (lambda: block_mask(recursive), "mask_mod: recursive is recursive, which calls itself"),
    "trained": (lambda: block_mask(lambda b, h, i, j: TRAINED[i] <= 0), r"a trained tensor .* as tensor\.detach\(\)"),
    "numpy": (lambda: block_mask(functools.partial(windowed, np.int64(4), torch.zeros(4, TOKENS))), r"numpy.int64: .*item\(\)"),
    "global": (lambda: block_mask(lambda b, h, i, j: SHARED[b, i] == SHARED[b, j]), "reads a tensor of its module"),
    "slice": (lambda: MASKS["argument"](batch(0).documents)[:2], "sliced, .* give pipe.step the mask of the whole batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_hide_tensors_are_refused(name: str) -> None:
    mask, text = REFUSED[name]
    with pytest.raises(BatchError, match=text):
        FlatMicrobatch.of(graphpp.Microbatch((mask(),)))


def test_a_mask_of_other_rows_than_the_batch_is_refused() -> None:
    documents = batch(0).documents
    given = FlatMicrobatch.of(graphpp.Microbatch((documents, documents, MASKS["argument"](documents[:2]))))
    with pytest.raises(BatchError, match="of a block mask of 2 rows, and the call has 4 rows"):
        BatchCutter(dims=BatchDims()).cut(given, 2)


@pytest.mark.parametrize("dims", [None, {"mask": None}])
def test_a_mask_of_several_rows_never_goes_whole(dims: Any) -> None:
    documents = batch(0).documents
    cutter = BatchCutter(dims=BatchDims(dims or {}))
    for mask, wrong in ((MASKS["argument"](documents), True), (block_mask(causal), False)):
        with pytest.raises(BatchError, match="mask of 4 rows, and goes whole") if wrong else contextlib.nullcontext():
            given = {"mask": graphpp.whole(mask) if dims is None else mask}
            cutter.cut(FlatMicrobatch.of(graphpp.Microbatch((documents,), given)), 2)


def signature(mask: BlockMask) -> tuple[str, ...]:
    return FlatMicrobatch.of(graphpp.Microbatch((mask,))).signature


def test_masks_differ_in_code_numbers_and_shapes_alone() -> None:
    documents = [batch(step).documents for step in range(2)]
    same = [signature(MASKS["argument"](each)) for each in documents]
    assert same[0] == same[1]
    windows = [signature(block_mask(functools.partial(windowed, window, documents[0]), 4)) for window in (3, 3, 5)]
    assert windows[0] == windows[1] != windows[2]
    others = [same[0], windows[0], *(signature(block_mask(mask_mod)) for mask_mod in (causal, lambda b, h, i, j: i > j))]
    assert len({*others, signature(MASKS["argument"](documents[0][:3]))}) == 5
    readable = [line for line in signature(block_mask(functools.partial(windowed, 3, documents[0]), 4)) if "is int 3" in line]
    assert len(readable) == 1 and readable[0].startswith("the block mask's mask_mod is int")
    assert "0x" not in str(same)  # no address, so equal on all ranks


class Holding(Decoder):
    """Reads the mask of an attribute."""

    mask: BlockMask

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens, self.mask)


def test_a_dumped_backward_runs_as_it_stands(tmp_path: Path) -> None:
    data = batch(0)
    pipe = graphpp.compile(Decoder(layers=1), loss, split=1, microbatches=1, debug=str(tmp_path))
    pipe.step(data.tokens, block_mask(causal), target=data.labels)
    (file,) = (tmp_path / "rank0" / "train" / "programs").glob("stage0_backward.py")
    found = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert "torch.ops.graphpp" in file.read_text()
    assert found.returncode == 0 and "layers.0.bias" in found.stdout, found.stderr


def test_a_mask_that_is_replaced_in_an_attribute_is_captured_anew(caplog: pytest.LogCaptureFixture) -> None:
    model, data = Holding(layers=1), batch(0)
    pipe = graphpp.compile(model, loss, split=1, microbatches=1)
    for window in (2, 7):
        model.mask = block_mask(and_masks(causal, functools.partial(windowed, window, data.documents)), 4)
        found = pipe.step(data.tokens, target=data.labels).loss
        with operators.trains_on_cpu():
            assert torch.equal(found, loss(model(data.tokens), data.labels))
    (warning,) = [each.getMessage() for each in caplog.records if "not audited" in each.getMessage()]  # once for two captures
    assert warning.endswith("they call an operator with a body: flex_attention")


def test_a_part_of_a_mask_reads_its_own_rows() -> None:
    documents = batch(0, 5).documents
    whole = FlatMicrobatch.of(graphpp.Microbatch((documents, MASKS["argument"](documents))))
    expected = create_mask(within_documents(documents), 5, 1, TOKENS, TOKENS, device="cpu")
    masks = [part.microbatch().args[1] for part in BatchCutter(dims=BatchDims()).cut(whole, 2)]
    pairs = zip(masks, (3, 2), strict=True)
    dense = [create_mask(mask.mask_mod, rows, 1, TOKENS, TOKENS, device="cpu") for mask, rows in pairs]
    assert torch.equal(torch.cat(dense), expected)
    blocks = MASKS["argument"](documents).to_dense()
    assert torch.equal(torch.cat([mask.to_dense() for mask in masks]), blocks)
    again = [FlatMicrobatch.of(graphpp.Microbatch((mask,))) for mask in masks]
    assert [len(each.tensors) for each in again] == [len(whole.tensors) - 1] * 2


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Transformers compiles the attention and its mask, and Inductor has no backward on the CPU."""

    def mask(**given: Any) -> BlockMask:
        return create_block_mask(**{name: value for name, value in given.items() if name != "_compile"})

    wrapper = of_transformers.WrappedFlexAttention
    plainly = patch.object(wrapper, "__new__", lambda kind, training: lambda: flex_attention)
    with plainly, patch.object(masking_utils, "create_block_mask", mask), operators.trains_on_cpu():
        yield


def row_of_transformers(kind: str, step: int) -> dict[str, Any]:
    data = batch(step, 2)
    given: dict[str, Any] = {"input_ids": data.tokens, "labels": data.labels, "num_items_in_batch": 36}
    if kind == "positions":
        given["position_ids"] = torch.cat([torch.arange(3 + step), torch.arange(7 - step)]).expand(2, -1).contiguous()
    if kind == "mask":
        given["attention_mask"] = MASKS["argument"](data.documents)
    return given


@pytest.mark.parametrize("kind", ["positions", *further("mask", "causal")])
def test_llama_of_transformers(kind: str) -> None:
    """Documents by `position_ids`, by a block mask given as `attention_mask`, and one document a row."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    own = {"vocab_size": WORDS, "num_hidden_layers": 2, "use_cache": False, "attn_implementation": "flex_attention"}
    model = LlamaForCausalLM(LlamaConfig(**own, **sizes))
    pipe = graphpp.compile(model, split=2, gradients="sum")
    for step in range(STEPS):
        parts = [row_of_transformers(kind, 2 * step + at) for at in range(2)]
        losses = pipe.step_microbatches([graphpp.Microbatch((), part) for part in parts]).losses
        grads = {fqn: each.grad.clone() for fqn, each in model.named_parameters() if each.grad is not None}
        model.zero_grad()
        with uncompiled():
            expected = [model(**part).loss for part in parts]
        sum(expected).backward()
        assert torch.equal(losses, torch.stack(expected))
        assert {fqn for fqn, each in model.named_parameters() if not torch.equal(each.grad, grads[fqn])} == set()
        model.zero_grad()
