"""The private names of torch for data-dependent numbers, such as the number of rows in `x[mask]`.

Checked on torch 2.13.0 and 2.15.0:

- `torch.fx.experimental.symbolic_shapes.ShapeEnv`: `var_to_range`, `create_unbacked_symint`, `create_unbacked_symfloat`,
  `create_symintnode`, `create_symfloatnode`, `create_symboolnode`, `ignore_fresh_unbacked_symbols`, `size_like`,
  `deferred_runtime_asserts`, `unbacked_symint_counter`, `unbacked_symfloat_counter`
- `torch.utils._sympy`: `numbers.int_oo`, `value_ranges.ValueRanges`, `interp.sympy_interp`, `reference.PythonReferenceAnalysis`
- `torch.fx.experimental.sym_node.SymNode`: symbolic arithmetic; `torch._subclasses.fake_tensor.FakeTensorMode`
- `SymInt.node`: `expr`, `_expr` (the expression before replacements), `shape_env`

A trace has an unbacked symbol for each such number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode

from graphpp._torch.size_expressions import read_expression
from graphpp._torch.symbols import SYMBOLIC, is_unknown, largest, plain_number
from graphpp._torch.this_thread import replaced


def known(size: Any) -> Any:
    """The upper bound of a data-dependent size; any other size unchanged."""
    return largest(size) if is_unknown(size) else size


def has_unknown_size(value: Any) -> bool:
    """Whether a number, or a size of a tensor or of a tensor in a tuple, is data-dependent."""
    if isinstance(value, list | tuple):
        return any(map(has_unknown_size, value))
    return any(map(is_unknown, value.shape if isinstance(value, torch.Tensor) else (value,)))


def is_of_data(value: Any) -> bool:
    """Like `has_unknown_size`, also for symbols that the trace has since found to have only one value."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(value, list | tuple):
        return any(map(is_of_data, value))
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(bool(free_unbacked_symbols(each.node._expr)) for each in numbers if isinstance(each, SYMBOLIC))


def as_constant(value: Any) -> Any:
    """A symbolic number with a known value as a plain number; any other value unchanged."""
    constant = isinstance(value, SYMBOLIC) and not value.node.expr.free_symbols
    return plain_number(value, value.node.expr) if constant else value


def own_symbol(size: Any) -> Any:
    """The symbol of a data-dependent number; None for other numbers and for compound expressions."""
    if not isinstance(size, SYMBOLIC) or not is_of_data(size):
        return None
    made = size.node._expr
    if isinstance(size, torch.SymBool) and made.func.__name__ == "Equality":  # a truth value is the symbol of 0 or 1
        made = made.args[0]
    return made if made.is_Symbol else None


def assumptions(mode: FakeTensorMode) -> list[Any]:
    """The deferred runtime asserts on data-dependent numbers in a fake mode, as sympy expressions."""
    env: Any = mode.shape_env
    return list(dict.fromkeys(each.expr for found in env.deferred_runtime_asserts.values() for each in found))


def compute(graph: fx.Graph, expr: Any, numbers: Mapping[Any, fx.Node]) -> list[fx.Node]:
    """Add nodes with `meta["val"]` that compute `expr`; the last one has the result."""
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


@contextlib.contextmanager
def refused_float_arithmetic(refuse: Callable[[], NoReturn]) -> Iterator[None]:
    """Refuse arithmetic with data-dependent floats: torch simplifies `(a + 1e16) - 1e16` to `a`, Python rounds."""
    with contextlib.ExitStack() as stack:
        for name in _ARITHMETIC:
            stack.enter_context(replaced(SymNode, name, _refusing(getattr(SymNode, name), refuse)))
        yield


_ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "float_truediv", "neg"),
    *("mod", "pow", "float_pow", "floordiv", "abs", "sym_max", "sym_min"),
)


def _refusing(original: Callable[..., Any], refuse: Callable[[], NoReturn]) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        if any(each.pytype is float and is_unknown(torch.SymFloat(each)) for each in operands):
            refuse()
        return original(*operands)

    return run


def bounds(size: Any) -> dict[str, list[int | None]]:
    """The lower and upper bound of each symbol in a size; None where torch knows no bound."""
    ranges = {symbol: size.node.shape_env.var_to_range[symbol] for symbol in size.node.expr.free_symbols}

    def number(bound: Any) -> int | None:
        return int(bound) if bound.is_Integer else None

    return {symbol.name: [number(each.lower), number(each.upper)] for symbol, each in sorted(ranges.items(), key=str)}


class DecidedByData:
    """Reads the data-dependent numbers of one serialized graph into a fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._env: Any = mode.shape_env
        self._names: dict[str, Any] = {}

    def read(self, kind: str, written: Any, bounds: Mapping[str, Sequence[int | None]]) -> Any:
        """A `SymInt`, `SymFloat` or `SymBool` from its serialized expression and the bounds of its symbols."""
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
        with env.ignore_fresh_unbacked_symbols():  # no operation of a trace makes this symbol
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


def divide(numerator: float, denominator: float) -> float:
    """Divide as C++ does: infinite or NaN where Python raises `ZeroDivisionError`."""
    if denominator:
        return numerator / denominator
    infinite = bool(numerator) and not math.isnan(numerator)
    return math.copysign(math.inf, numerator) * math.copysign(1.0, denominator) if infinite else math.nan


def fake_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty((), dtype=dtype, device=device)
