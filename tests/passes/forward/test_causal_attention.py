"""Masks that depend on positions alone: their formulas equal their elements, and causal ones leave the graph."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphpp
from graphpp.capture.trace import capture
from graphpp.passes.forward.causal_attention import causal_attention
from graphpp.passes.forward.formulas import Formula, Line
from graphpp.passes.forward.positions import positions

Mask = Callable[[int], Tensor]


def rows(size: int) -> Tensor:
    return torch.arange(size)[:, None]


def columns(size: int) -> Tensor:
    return torch.arange(size)[None, :]


def lower(size: int, diagonal: int = 0) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril(diagonal)


def written_afterwards(size: int) -> Tensor:
    mask = lower(size)
    mask[:2].fill_(True)
    return mask


def documents(size: int, prepend: int = -1) -> Tensor:
    """As transformers finds documents in a row, here in position ids without a second document."""
    ids = torch.arange(size)[None, :].expand(2, -1)
    of = (torch.diff(ids, dim=-1, prepend=ids[:, :1] + prepend) != 1).cumsum(-1)
    batch, row, column = torch.arange(2).view(2, 1, 1, 1), rows(size)[None, None], columns(size)[None, None]
    return (ids[batch, column] <= ids[batch, row]) & (of[batch, row] == of[batch, column])


CAUSAL: dict[str, Mask] = {
    "tril": lower,
    "not triu": lambda size: ~torch.ones(size, size, dtype=torch.bool).triu(1),
    "-inf above": lambda size: torch.full((size, size), -math.inf).triu(1),
    "least above": lambda size: torch.zeros(size, size).masked_fill(~lower(size), torch.finfo(torch.float32).min),
    "compared": lambda size: columns(size) <= rows(size),
    "compared doubles": lambda size: 2 * columns(size) < 2 * rows(size) + 1,
    "selected": lambda size: torch.where(rows(size) < columns(size), -math.inf, 0.0),
    "one of two": lambda size: lower(size) | (columns(size) < 0),
    "each head": lambda size: lower(size).expand(2, 3, size, size),
    "transposed": lambda size: (rows(size) <= columns(size)).mT,
    "long window": lambda size: lower(size) & (columns(size) > rows(size) - 8),
    "documents": documents,
}
WHOLE: dict[str, Mask] = {"ones": lambda size: torch.ones(size, size).bool(), "zeros": lambda size: torch.zeros(1, size)}
OTHERS: dict[str, Mask] = {
    "window": lambda size: lower(size) & (columns(size) > rows(size) - 3),
    "one more": lambda size: lower(size, 1),
    "reversed": lambda size: columns(size) >= rows(size),
    "prefix": lambda size: lower(size) | (columns(size) < 3),
    "bias": lambda size: (columns(size) - rows(size)).float(),
    "soft": lambda size: torch.zeros(size, size).masked_fill(~lower(size), -10.0),
    "written": written_afterwards,
    "two documents": lambda size: documents(size, prepend=0) & ((columns(size) < 4) == (rows(size) < 4)),
}
KINDS = {**dict.fromkeys(CAUSAL, True), **dict.fromkeys(WHOLE, False), **dict.fromkeys(OTHERS, None)}


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x.flip(-1), x.square(), attn_mask=self.mask(x.shape[-2]), scale=0.5)


def exported(mask: Mask, symbolic: bool) -> tuple[fx.GraphModule, Tensor]:
    x = torch.randn(2, 3, 8, 4)
    sizes = {"x": {2: torch.export.Dim.DYNAMIC}} if symbolic else None
    module = torch.export.export(Attention(mask), (x,), strict=False, dynamic_shapes=sizes).module(check_guards=False)
    return module, x


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_mask_that_hides_later_positions_leaves_the_graph(name: str, symbolic: bool) -> None:
    mask = {**CAUSAL, **WHOLE, **OTHERS}[name]
    module, x = exported(mask, symbolic)
    expected = module(x)
    causal = None if symbolic and name == "long window" else KINDS[name]
    assert causal_attention(module) == (causal is not None)
    module.recompile()
    torch.testing.assert_close(module(x), expected)
    (call,) = (node for node in module.graph.nodes if "scaled_dot_product" in str(node.target))
    assert call.kwargs["scale"] == 0.5
    assert (call.kwargs.get("is_causal"), call.kwargs.get("attn_mask", *call.args[3:4]) is None) == (causal, causal is not None)


def kept_in(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> Mask:
    return lambda size: change(lower(size).to(dtype))


def steep(size: int) -> Tensor:
    at = torch.arange(size, dtype=torch.int32) * 2**30
    return at[None] <= at[:, None]


def written(change: Callable[[Tensor], Any]) -> Mask:
    def mask(size: int) -> Tensor:
        found = lower(size).float()
        change(found)
        return found > 0

    return mask


PITFALLS: dict[str, Mask] = {
    "a number that rounds to 1": kept_in(torch.float16, lambda mask: mask > 0.9999),
    "a number that rounds in float32": kept_in(torch.float32, lambda mask: ~(mask < 1.00000001)),
    "a number beyond int32": lambda size: columns(size).int() < 2**40,
    "bytes are positive": kept_in(torch.uint8, lambda mask: ~mask < 255),
    "wraps": kept_in(torch.int64, lambda mask: mask * 2**62 * 4 > 0),
    "wraps along the rows": steep,
    "bits of another dtype": kept_in(torch.int32, lambda mask: mask.view(torch.float32) >= 1),
    "written through dropout": written(lambda mask: F.dropout(mask, 0.5, training=False)[0].fill_(1.0)),
    "written through a part": written(lambda mask: mask.unbind(0)[0].fill_(1.0)),
    "written in a list": written(lambda mask: torch._foreach_mul_([mask], 0.0)),
    "transposed of one dimension": lambda size: torch.arange(size).t()[None] <= rows(size),
    "arange of three": lambda size: torch.arange(0, size, 1)[None] <= rows(size),
    "no elements": lambda size: lower(size) & (~((rows(size)[:0] <= columns(size)) & (rows(size)[:0] >= 0))).all(),
}
NUMBERS = st.integers(-3, 6)
COMPARISONS = [torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne]


@st.composite
def masks(draw: Any, depth: int = 3) -> Mask:
    """A random expression of rows, columns, comparisons, logic, selections and views."""
    if depth == 0:
        compare, a, b, c = draw(st.sampled_from(COMPARISONS)), draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)
        return lambda size: compare(a * rows(size) + b * columns(size), c)
    one, other = draw(masks(depth - 1)), draw(masks(depth - 1))
    diagonal, begin = draw(NUMBERS), draw(st.integers(0, 2))
    forms: list[Mask] = [
        lambda size: one(size) & other(size),
        lambda size: one(size) | ~other(size),
        lambda size: torch.where(one(size), other(size), one(size)),
        lambda size: one(size).tril(diagonal),
        lambda size: one(size).mT,
        lambda size: one(size + begin)[begin:, begin:],
        lambda size: one(2 * size)[::2, 1::2],
        lambda size: one(size)[rows(size), columns(size) // 1 if begin else columns(size)],
        lambda size: one(size).float().masked_fill(other(size), -math.inf) == 0,
    ]
    return draw(st.sampled_from(forms))  # type: ignore[no-any-return]


def element(formula: Formula, index: tuple[int, ...]) -> float:
    at = sum(one * other for one, other in zip(formula.along, index, strict=True))
    return at + formula.start if isinstance(formula, Line) else formula.values[bisect_right(formula.cuts, at)]


class Values(fx.Interpreter):
    """The tensor of each node, copied as the node has computed it."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.copies = {**getattr(self, "copies", {}), n: value.clone() if isinstance(value, Tensor) else value}
        return value


@given(masks())
def test_a_formula_gives_every_element(mask: Mask) -> None:
    assert check_formulas(lambda size: torch.where(mask(size), 0.0, -1.0)) > 2


@pytest.mark.parametrize("name", PITFALLS)
def test_a_formula_holds_for_dtypes_that_round_and_memory_that_is_written(name: str) -> None:
    assert check_formulas(PITFALLS[name])


def check_formulas(mask: Mask) -> int:
    """Compare the formulas of an exported call with the elements of its tensors; how many there are."""
    module, x = exported(mask, symbolic=False)
    values = Values(module, garbage_collect_values=False)
    values.run(x)
    found = positions(module.graph)
    for node, formula in found.items():
        tensor = values.copies[node]
        for index in product(*map(range, tensor.shape)):
            assert tensor[index].item() == element(formula, index), (node.format_node(), formula, index)
    return len(found)


@pytest.mark.parametrize("varying", [None, {"kwargs['input_ids']": [1], "kwargs['labels']": [1]}])
def test_transformers_llama_takes_the_kernel_without_a_mask(varying: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    found = []
    for more in ({}, {"attention_mask": torch.ones_like(ids)}):  # a mask of the batch may hide any position
        example = graphpp.Microbatch((), {**batch, **more})
        joint = capture(LlamaForCausalLM(config), None, example, torch.device("cpu"), varying=varying).joint
        (call,) = joint.graph.find_nodes(
            op="call_function", target=torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        )
        found.append((call.args[4:5], call.kwargs.get("attn_mask") is None))
    assert found == [((True,), True), ((), False)]


def test_where_sizes_vary_no_choice_depends_on_one() -> None:
    module, _ = exported(CAUSAL["long window"], symbolic=False)
    assert causal_attention(module, any_size=True) == 0
    assert causal_attention(module) == 1
