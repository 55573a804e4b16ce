"""Let attention compute the mask that lets each position attend to the positions up to itself, instead of reading a tensor.

Contract of `causal_attention`
- A call of `scaled_dot_product_attention` whose mask equals the causal one for every input gets `is_causal=True` and no mask;
  one whose mask hides nothing gets no mask. Then torch takes a kernel without a mask, forward and backward, and the mask of
  [.., queries, keys] is neither computed nor saved. Values are equal up to the rounding of another kernel.
- Equality is proved from the operations that compute the mask (`positions.py`). A mask that depends on an input or a buffer,
  as one of padding or of documents in a row, stays, and so does a sliding window shorter than the row.
- The order of the nodes, and everything else, stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpp.passes.forward.formulas import Formula, Steps
from graphpp.passes.forward.positions import positions

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_NAMES = tuple(each.name for each in _ATTENTION._schema.arguments)


def causal_attention(module: fx.GraphModule, any_size: bool = False) -> int:
    """Rewrite the calls of an exported forward, in place; how many were rewritten. The caller recompiles the module.

    `any_size`: only calls for which that is right at all sizes, so graphs for a size and for open sizes have the same calls.
    """
    masked = [node for node in module.graph.nodes if node.target is _ATTENTION and _mask(node) is not None]
    found = positions(module.graph, any_size) if masked else {}
    rewritten = 0
    for node in masked:
        mask, given = _mask(node), dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        causal = _is_causal(found.get(mask), mask.meta["val"], _sizes(given))
        if causal is not None and not given.get("is_causal", False):
            node.args = (given.pop("query"), given.pop("key"), given.pop("value"))
            node.kwargs = {name: value for name, value in given.items() if name != "attn_mask"} | {"is_causal": causal}
            rewritten += 1
    return rewritten


def _mask(node: fx.Node) -> Any:
    return node.args[3] if len(node.args) > _NAMES.index("attn_mask") else node.kwargs.get("attn_mask")


def _sizes(given: dict[str, Any]) -> tuple[Any, Any]:
    """The number of queries and of keys."""
    return given["query"].meta["val"].shape[-2], given["key"].meta["val"].shape[-2]


def _is_causal(formula: Formula | None, mask: torch.Tensor, sizes: tuple[Any, Any]) -> bool | None:
    """True for the causal mask, False for one that hides nothing, None for every other."""
    if not isinstance(formula, Steps):
        return None
    hides = [_hides(value, mask.dtype) for value in formula.values]
    if hides == [False]:
        return False
    rows_less_columns = (*(0,) * (len(formula.along) - 2), 1, -1)
    square = str(sizes[0]) == str(sizes[1])
    return True if square and (formula.along, formula.cuts, hides) == (rows_less_columns, (0,), [True, False]) else None


def _hides(value: float, dtype: torch.dtype) -> bool | None:
    """Whether an element of a mask hides its key, wholly or not at all; None for a bias, which is added to the score."""
    if dtype is torch.bool:
        return not value
    if value == 0:
        return False
    return True if value <= torch.finfo(dtype).min else None
