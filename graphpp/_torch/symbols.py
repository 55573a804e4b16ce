"""The private names of torch for symbolic sizes: the symbols, the guards that a trace assumed, their values.

Checked on torch 2.13.0 and 2.15.0:

- `torch.fx.experimental.symbolic_shapes.ShapeEnv`: `guards`, `replacements`, `var_to_range`, `var_to_sources`,
  `backed_var_to_val`, `create_symbol`, `create_symintnode`, `create_symfloatnode`, `bound_sympy`
  - `torch.fx.experimental.symbolic_shapes`: `DimDynamic`, `free_unbacked_symbols`; `torch._dynamo.source.ConstantSource`
- `torch._functorch.aot_autograd`: loads what a trace needs
- `torch._subclasses.fake_tensor.FakeTensorMode`
- `torch._guards`: `TracingContext`, `tracing`: an export in a given fake mode
- `torch.utils._sympy.numbers.int_oo`
- `SymInt.node`: `expr`, `hint`, `shape_env`

A symbol stands for one dimension of one input; `numbers_of_data.py` has the symbols of data-dependent numbers. Sympy takes a
second to import, so functions import it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from traceback import FrameSummary
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpp._torch.size_expressions import read_expression, write_expression

Place = tuple[int, int]  # index of an input, dimension

_FLOATING = {"ToFloat", "IntTrueDiv", "FloatTrueDiv", "FloatPow"}  # functions of torch's with floating-point results
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLACE = re.compile(r"^L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]$")


def hint(size: Any) -> Any:
    """A size as a number: its value within `considering`, else in the trace, or its upper bound if it is data-dependent."""
    if not isinstance(size, SYMBOLIC):
        return size
    if is_unknown(size):
        return largest(size)
    if not size.node.expr.free_symbols:
        return plain_number(size, size.node.expr)
    values = _CONSIDERED.get()
    return size.node.hint if values is None else values(size)


def expression(size: Any) -> Any:
    return size.node.expr


def plain_number(size: Any, value: Any) -> Any:
    """Convert a sympy number to the Python type of `size`."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next(kind for symbolic, kind in kinds.items() if isinstance(size, symbolic))(value)


def name_of(size: Any) -> str:
    """The formula of a symbolic size as text, such as `2*s1`; floats keep all digits."""
    import sympy

    expr = size.node.expr
    return str(expr.xreplace({each: sympy.Symbol(repr(float(each))) for each in expr.atoms(sympy.Float)}))


def formula(size: Any) -> Any:
    """The size, or the sympy expression of a symbolic one. Comparing formulas adds no guard."""
    return size.node.expr if isinstance(size, SYMBOLIC) else size


def symbols_in(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols)


def as_expression(number: float) -> Any:
    import sympy

    return sympy.sympify(number)


def symbols_of(size: Any) -> list[str]:
    return [symbol.name for symbol in size.node.expr.free_symbols] if isinstance(size, SYMBOLIC) else []


def symbol_sizes(size: Any) -> dict[str, Any]:
    """The symbols of a symbolic size, by name, each as a `SymInt`."""
    env = size.node.shape_env
    symbols = size.node.expr.free_symbols
    return {each.name: env.create_symintnode(each, hint=int(env.backed_var_to_val[each])) for each in symbols}


def is_unknown(value: Any) -> bool:
    """Whether a number is data-dependent: an expression of more than the input sizes."""
    return bool(unknown_symbols(value))


def unknown_symbols(value: Any) -> set[Any]:
    """The symbols of data-dependent numbers in a number."""
    if not isinstance(value, SYMBOLIC):
        return set()
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def largest(size: Any) -> float:
    """The upper bound of a data-dependent number; infinite if torch knows no bound."""
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound.is_Integer else float(bound)


def mode_with_symbols() -> FakeTensorMode:
    from torch._functorch import aot_autograd  # noqa: F401  (`aot.fake_mode` says why)
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)


@contextlib.contextmanager
def export_in(mode: FakeTensorMode) -> Iterator[None]:
    """Within this context `torch.export` makes its fake tensors in `mode`."""
    with tracing(TracingContext(mode)):
        yield


def varying(dims: Sequence[Sequence[int]]) -> dict[str, tuple[dict[int, Any], ...]]:
    """The `dynamic_shapes` of an export of `forward(*tensors)`; `dims`: the dynamic dimensions of each tensor."""
    return {"tensors": tuple({dim: torch.export.Dim.AUTO for dim in each} for each in dims)}


def inputs_of(exported: torch.export.ExportedProgram) -> tuple[torch.Tensor, ...]:
    names = exported.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    return tuple(values[str(name)] for name in names)


@dataclass(frozen=True)
class Values:
    """Evaluates sizes of one graph for given numbers of its symbols; results are cached by expression."""

    of_symbols: Mapping[Any, Any]
    _known: dict[Any, Any] = field(default_factory=dict, compare=False)

    def __call__(self, size: Any) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        key = type(size), size.node.expr
        if key not in self._known:
            self._known[key] = plain_number(size, size.node.expr.xreplace(self.of_symbols))
        return self._known[key]


@contextlib.contextmanager
def considering(values: Values | None) -> Iterator[None]:
    """Within this context `hint` evaluates sizes with `values`; None changes nothing."""
    token = _CONSIDERED.set(values or _CONSIDERED.get())
    try:
        yield
    finally:
        _CONSIDERED.reset(token)


_CONSIDERED: ContextVar[Values | None] = ContextVar("sizes considered", default=None)


def at_values(value: Any, values: Values) -> Any:
    """A value of a graph with all symbolic sizes replaced by numbers; each fake tensor gets its own fake mode."""
    if isinstance(value, list | tuple):
        return type(value)(at_values(each, values) for each in value)
    if not isinstance(value, torch.Tensor):
        return values(value)
    shape, stride = tuple(map(values, value.shape)), tuple(map(values, value.stride()))
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def in_new_mode(values: Sequence[Any], mode: FakeTensorMode) -> tuple[list[Any], Symbols]:
    """Copies of fake tensors and numbers in a new fake mode, and its symbols; new guards stay in the new mode."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env: Any = mode.shape_env
    known: dict[Any, Any] = {}

    def renamed(size: Any) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        for symbol in sorted(size.node.expr.free_symbols - known.keys(), key=str):
            number = int(size.node.shape_env.backed_var_to_val[symbol])
            known[symbol] = env.create_symbol(number, ConstantSource(f"size {symbol}"), DimDynamic.DYNAMIC)
        make = env.create_symfloatnode if isinstance(size, torch.SymFloat) else env.create_symintnode
        return make(size.node.expr.xreplace(known), hint=size.node.hint)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return renamed(value)
        shape, stride = tuple(map(renamed, value.shape)), tuple(map(renamed, value.stride()))
        with mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    return list(map(moved, values)), Symbols(mode, (), names=known)


class Symbols:
    """The symbols of one graph and its guards: the graph is valid for other sizes exactly if all guards are true.

    A trace branches on its example's sizes and records each comparison as a guard. Graph passes may add guards.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        shapes: Sequence[Sequence[Any]],
        facts: Sequence[Any] = (),
        names: Mapping[Any, Any] | None = None,
    ) -> None:
        """`shapes`: symbolic input shapes. `facts`: guards read from a file. `names`: another graph's symbols -> `mode`'s."""
        self._env: Any = mode.shape_env
        self._names = names
        self._closed = [[None if isinstance(size, SYMBOLIC) else size for size in shape] for shape in shapes]
        self._read = tuple(facts)

    @property
    def places(self) -> dict[Any, Place]:
        """The input index and dimension of each symbol."""
        found = {}
        for symbol, sources in self._env.var_to_sources.items():
            for source in sources or [self._sources_of_read[symbol]]:
                match = _PLACE.match(_name(source))
                if match is None:
                    raise ValueError(f"a symbol stands for {_name(source)}, which is no size of an input")
                found[symbol] = (int(match[1]), int(match[2]))
        return found

    @cached_property
    def _sources_of_read(self) -> dict[Any, Any]:
        return {symbol: name for name, symbol in self._env.source_to_var.items()}

    @property
    def facts(self) -> list[Any]:
        """The guards, as sympy expressions, with the range of each symbol."""
        import sympy
        from torch.utils._sympy.numbers import int_oo

        env = self._env
        facts = [*self._read, *(guard.expr for guard in env.guards)]
        facts += [sympy.Eq(symbol, other, evaluate=False) for symbol, other in env.replacements.items()]
        for symbol in self.places if self._names is None else self._names.values():
            bounds = env.var_to_range[symbol]
            facts.append(sympy.Ge(symbol, bounds.lower, evaluate=False))
            if bounds.upper not in (int_oo, sympy.oo):
                facts.append(sympy.Le(symbol, bounds.upper, evaluate=False))
        return list(dict.fromkeys(facts))

    @property
    def compares_floats(self) -> bool:
        """Whether a guard has a floating-point number. Sympy rounds floats differently from Python."""
        import sympy

        return any(fact.atoms(sympy.Float) or _FLOATING & {each.func.__name__ for each in fact.atoms(sympy.Function)}
                   for fact in self.facts)

    @property
    def free(self) -> set[Place]:
        """The dimensions that the trace did not specialize to one size."""
        replaced = self._env.replacements
        return {place for symbol, place in self.places.items() if not replaced.get(symbol, symbol).is_number}

    def equalities(self) -> list[tuple[str, FrameSummary | None]]:
        """The guards that two sizes are equal, as text, each with the source line that added the guard."""
        found = []
        for guard in self._env.guards:
            if guard.expr.func.__name__ == "Equality":
                left, right = guard.expr.args
                found.append((f"{left} == {right}", guard.sloc.maybe_user_loc or guard.sloc.framework_loc))
        return found

    def values(self, shapes: Sequence[Sequence[int]]) -> Values | None:
        """The symbols' values for these input shapes; None if the graph is not valid for them."""
        import sympy

        if not all(_fits(shape, closed) for shape, closed in zip(shapes, self._closed, strict=True)):
            return None
        values = Values({symbol: sympy.Integer(shapes[index][dim]) for symbol, (index, dim) in self.places.items()})
        return values if self.hold(values) else None

    def hold(self, values: Values) -> bool:
        """Whether all guards hold for these numbers."""
        numbers = values.of_symbols
        if self._names is not None:
            numbers = {own: numbers[symbol] for symbol, own in self._names.items()}
        return all(fact.xreplace(numbers) == True for fact in self.facts)  # noqa: E712  (sympy's, or Python's)

    def written(self) -> dict[str, Any]:
        """Symbols and guards as plain data."""
        env = self._env
        symbols = [
            [symbol.name, f"L['tensors'][{index}].size()[{dim}]", int(env.backed_var_to_val[symbol])]
            for symbol, (index, dim) in self.places.items()
        ]
        return {"shapes": self._closed, "symbols": symbols, "facts": [write_expression(fact) for fact in self.facts]}

    @classmethod
    def read(cls, data: Mapping[str, Any], mode: FakeTensorMode) -> Symbols:
        """Inverse of `written`, in a new fake mode. Raises `ValueError` if a symbol gets another name in this process."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        env: Any = mode.shape_env
        names = {}
        for name, source, size in data["symbols"]:
            names[name] = env.create_symbol(size, ConstantSource(source), DimDynamic.DYNAMIC)
            if names[name].name != name:
                raise ValueError(f"the symbol {name} of a written graph is {names[name].name} in this process")
        read = cls(mode, (), [read_expression(fact, names) for fact in data["facts"]])
        read._closed = data["shapes"]
        return read

    def read_size(self, written: Any, size: float) -> Any:
        """A symbolic size from its serialized expression; `size`: its value in the trace."""
        names = {symbol.name: symbol for symbol in self._env.var_to_sources}
        expr = read_expression(written, names)
        make = self._env.create_symfloatnode if isinstance(size, float) else self._env.create_symintnode
        return make(expr, hint=size)


def _fits(shape: Sequence[int], closed: Sequence[int | None]) -> bool:
    return len(shape) == len(closed) and all(fixed in (None, size) for size, fixed in zip(shape, closed, strict=True))


def _name(source: Any) -> str:
    name = source if isinstance(source, str) else source.name
    return str(name() if callable(name) else name)
