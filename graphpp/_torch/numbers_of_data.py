"""The private names of torch for numbers that only the data decides, as the number of rows in `x[mask]`.

Checked on torch 2.13.0 and 2.15.0:

- `torch.fx.experimental.symbolic_shapes.ShapeEnv`: `var_to_range`, `create_unbacked_symint`, `create_unbacked_symfloat`,
  `create_symintnode`, `create_symfloatnode`, `create_symboolnode`, `ignore_fresh_unbacked_symbols`, `size_like`,
  `deferred_runtime_asserts`, `unbacked_symint_counter`, `unbacked_symfloat_counter`
- `torch.utils._sympy`: `numbers.int_oo`, `value_ranges.ValueRanges`; `interp.sympy_interp` and
  `reference.PythonReferenceAnalysis`, which compute an expression by operations
- `torch._subclasses.fake_tensor.FakeTensorMode`
- `SymInt.node`: `expr`, `_expr` (the expression as it was made), `shape_env`

A trace has a symbol for each such number, which torch calls unbacked: no input has it as a size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpp._torch.size_expressions import read_expression
from graphpp._torch.symbols import SYMBOLIC, is_unknown, largest


def known(size: Any) -> Any:
    """A size as it is, but for one that only the data decides the largest number that it can be."""
    return largest(size) if is_unknown(size) else size


def has_unknown_size(value: Any) -> bool:
    """Whether only the data decides a size of a tensor, or of a tensor in a tuple, or a number."""
    if isinstance(value, list | tuple):
        return any(map(has_unknown_size, value))
    return any(map(is_unknown, value.shape if isinstance(value, torch.Tensor) else (value,)))


def own_symbol(size: Any) -> Any:
    """The symbol that stands for a number which only the data decides; None for all other numbers and for expressions."""
    if not isinstance(size, SYMBOLIC) or not is_unknown(size):
        return None
    made = size.node._expr
    return made if made.is_Symbol else None


def assumptions(mode: FakeTensorMode) -> list[Any]:
    """The comparisons of numbers of data that traces in a fake mode have assumed, as sympy expressions."""
    env: Any = mode.shape_env
    return list(dict.fromkeys(each.expr for found in env.deferred_runtime_asserts.values() for each in found))


def compute(graph: fx.Graph, expr: Any, numbers: Mapping[Any, fx.Node]) -> list[fx.Node]:
    """Add the operations that compute an expression, with their values; the last node has the result."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    before = set(graph.nodes)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    sympy_interp(PythonReferenceAnalysis, {symbol: fx.Proxy(node, tracer) for symbol, node in numbers.items()}, expr)
    made = [node for node in graph.nodes if node not in before]
    for node in made:
        args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
        node.meta["val"] = node.target(*args)
    return made


def bounds(size: Any) -> dict[str, list[int | None]]:
    """The least and the largest number of each symbol in a size; None where torch knows of no bound."""
    ranges = {symbol: size.node.shape_env.var_to_range[symbol] for symbol in size.node.expr.free_symbols}

    def number(bound: Any) -> int | None:
        return int(bound) if bound.is_Integer else None

    return {symbol.name: [number(each.lower), number(each.upper)] for symbol, each in sorted(ranges.items(), key=str)}


class DecidedByData:
    """Reads the numbers that only the data decides, of one written graph, into a fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._env: Any = mode.shape_env
        self._names: dict[str, Any] = {}

    def read(self, kind: str, written: Any, bounds: Mapping[str, Sequence[int | None]]) -> Any:
        """A number of a class `SymInt`, `SymFloat` or `SymBool` from its written expression and the bounds of its symbols."""
        for name, (lower, upper) in bounds.items():
            if name not in self._names:
                self._names[name] = self._symbol(name, lower, upper)
        expr = read_expression(written, self._names)
        if kind == "SymBool":
            return self._env.create_symboolnode(expr)
        make = self._env.create_symfloatnode if kind == "SymFloat" else self._env.create_symintnode
        return make(expr, hint=None)

    def _symbol(self, name: str, lower: int | None, upper: int | None) -> Any:
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        env, number = self._env, int(name.lstrip("zuf"))
        floating = name.startswith("zuf")
        with env.ignore_fresh_unbacked_symbols():  # no trace waits for the operation that makes this symbol
            if floating:
                env.unbacked_symfloat_counter = number
                symbol = env.create_unbacked_symfloat().node.expr
            else:
                env.unbacked_symint_counter = number
                symbol = env.create_unbacked_symint().node.expr
        assert symbol.name == name, f"the symbol {name} of a written graph is {symbol} in this process"
        if not floating:
            env.var_to_range[symbol] = ValueRanges(-int_oo if lower is None else lower, int_oo if upper is None else upper)
            if lower is not None and lower >= 0:
                env.size_like.add(symbol)
        return symbol


def fake_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fake tensor without dimensions."""
    with FakeTensorMode():
        return torch.empty((), dtype=dtype, device=device)
