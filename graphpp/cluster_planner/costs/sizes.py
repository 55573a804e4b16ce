"""The sizes that an operator takes as plain numbers, as they are where dimensions of its operands are twice as large.

Contract: `scaled_call` gives the arguments of a call on larger operands; `regrouped` the growth of a reshaped value.
`FREE_SIZES` are the operators whose result has sizes of which the operands say nothing, `VIEWS` those that give a new shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import fx

from graphpp._torch.symbols import hint

Dims = tuple[int, ...]
FREE_SIZES = (
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "zeros", "ones", "empty", "full", "arange", "rand",
    "randn", "embedding_dense_backward", "scalar_tensor",
)  # fmt: skip
VIEWS = ("view", "_unsafe_view", "reshape")
Args = list[Any]


def regrouped(before: Sequence[int], dims: Dims, after: Sequence[int], single: bool = False) -> Dims:
    """The growth of a value of shape `before` that is viewed as `after`.

    `single`: the growing dimension of the graph's inputs has size 1, so a dimension of size 1 may be that one.
    """
    found, left, right = [0] * len(after), 0, 0
    while left < len(before) or right < len(after):
        first, other = left, right
        left, right = min(left + 1, len(before)), min(right + 1, len(after))
        while prod(before[first:left]) != prod(after[other:right]):
            if prod(before[first:left]) < prod(after[other:right]):
                left += 1
            else:
                right += 1
        for index in range(first, left):
            if dims[index]:
                place = _place(prod(before[first:index]), after[other:right], single)
                found[min(other + place, len(after) - 1)] += dims[index]
    return tuple(found)


def _place(outer: int, after: Sequence[int], single: bool) -> int:
    """The dimension of a group, by its index, that starts `outer` elements of the group's leading ones into it."""
    seen = 1
    for at, size in enumerate(after):
        if seen * size > outer or (single and seen == outer):
            return at
        seen *= size
    return max(len(after) - 1, 0)


def moved(shape: Sequence[int], own: Dims) -> Iterator[Dims]:
    """The other dimensions of a view that may be the sharded part of one that was split: the next ones."""
    for at, power in enumerate(own[:-1]):
        if power and not own[at + 1] and shape[at + 1] > 1:
            yield (*own[:at], 0, power, *own[at + 2 :])


def scaled_call(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    grown: Mapping[fx.Node, Any],
    made: Mapping[fx.Node, Any],
    twin: Dims | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call on the larger operands `made`; nodes become values, sizes become larger."""
    values = list(args)
    if name in _RULES:
        values = _RULES[name](values, grown, twin)
    take: Callable[[fx.Node], Any] = lambda node: made[node]  # noqa: E731
    return fx.node.map_arg(tuple(values), take), fx.node.map_arg(dict(kwargs), take)


def _slice(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
    """`slice(x, dim, start, end, step)`: a part of a growing dimension grows with it."""
    args = [*args, *[None] * (4 - len(args))]
    return [args[0], args[1] or 0, *_bounds(args[0], grown[args[0]], args[1] or 0, args[2:4]), *args[4:]]


def _slice_scatter(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
    args = [*args, *[0, None, None][len(args) - 2 :]] if len(args) < 5 else args
    return [*args[:2], args[2] or 0, *_bounds(args[0], grown[args[0]], args[2] or 0, args[3:5]), *args[5:]]


def _bounds(source: fx.Node, dims: Dims, dim: int, bounds: Sequence[Any]) -> list[Any]:
    size, power = hint(source.meta["val"].shape[dim]), dims[dim]
    return [None if each is None else each if each > size else each << power for each in bounds]


def _slice_backward(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
    """`slice_backward(gradient, sizes, dim, start, end, step)`: the result grows as the gradient does."""
    dims, dim = grown[args[0]], args[2]
    sizes = [hint(size) << power for size, power in zip(args[1], dims, strict=True)]
    bounds = [each if each > hint(args[1][dim]) else each << dims[dim] for each in args[3:5]]
    return [args[0], sizes, dim, *bounds, *args[5:]]


def _select_backward(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
    """`select_backward(gradient, sizes, dim, index)`."""
    dims = list(grown[args[0]])
    dims.insert(args[2] % len(args[1]), 0)
    dims = list(twin) if twin is not None else dims
    return [args[0], [hint(size) << power for size, power in zip(args[1], dims, strict=True)], *args[2:]]


def _split(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
    """`split(x, size or sizes, dim)`: parts of a growing dimension grow with it."""
    dim = args[2] if len(args) > 2 else 0
    power, parts = grown[args[0]][dim], args[1]
    sizes = [each << power for each in parts] if isinstance(parts, list | tuple) else parts << power
    return [args[0], sizes, dim]


def _group_norm(at: int) -> Callable[[Args, Mapping[fx.Node, Any], Dims | None], Args]:
    """Group norms take the batch as a number, at this place of their arguments."""

    def rule(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
        power = grown[args[0]][0]
        return [*args[:at], args[at] << power, *args[at + 1 :]]

    return rule


def _sizes_of_first(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
    """`as_strided` and the like of a whole operand: sizes equal to the operand's grow as the operand does."""
    value = args[0].meta["val"]
    if tuple(args[1]) == tuple(value.shape):
        return [args[0], [hint(size) << power for size, power in zip(args[1], grown[args[0]], strict=True)], *args[2:]]
    raise ValueError("sizes are plain numbers that do not follow from the operand")


def _sum_to_size(args: Args, grown: Mapping[fx.Node, Any], twin: Dims | None) -> Args:
    sizes = args[1]
    dims = grown[args[0]][len(grown[args[0]]) - len(sizes) :]
    return [args[0], [hint(size) << power if size != 1 else size for size, power in zip(sizes, dims, strict=True)]]


_RULES: Mapping[str, Callable[[Args, Mapping[fx.Node, Any], Dims | None], Args]] = {
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "split": _split,
    "split_with_sizes": _split,
    "unsafe_split": _split,
    "native_group_norm": _group_norm(3),
    "native_group_norm_backward": _group_norm(5),
    "as_strided": _sizes_of_first,
    "sum_to_size": _sum_to_size,
}
