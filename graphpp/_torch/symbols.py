"""The private names of torch for sizes that vary: symbols, the facts that a trace assumed of them, their values.

Checked on torch 2.13.0 and 2.15.0:

- `torch.fx.experimental.symbolic_shapes.ShapeEnv`: `guards`, `replacements`, `var_to_range`, `var_to_sources`,
  `backed_var_to_val`, `create_symbol`, `create_symintnode`, `create_symfloatnode`, `bound_sympy`; `DimDynamic`,
  `free_unbacked_symbols`
- `torch._dynamo.source.ConstantSource`: a name for a symbol
- `torch._functorch.aot_autograd`: loads what a trace needs
- `torch._subclasses.fake_tensor.FakeTensorMode`
- `torch._guards`: `TracingContext`, `tracing`: an export in a given fake mode
- `torch.utils._sympy.numbers.int_oo`
- `SymInt.node`: `expr`, `hint`, `shape_env`

A symbol stands for the size of one dimension of one input; `numbers_of_data.py` has the symbols of numbers that only the data
decides. Sympy takes a second to import, so this file imports it with the first graph that has symbols.
"""

from __future__ import annotations

import contextlib
import re
import weakref
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
    """The number of a size: for the `Values` that are considered, or else in the trace. A plain number as it is.

    For a number that only the data decides, the largest number that it can be.
    """
    if not isinstance(size, SYMBOLIC):
        return size
    if is_unknown(size):
        return largest(size)
    if not size.node.expr.free_symbols:
        return plain_number(size, size.node.expr)
    values = _CONSIDERED.get()
    return size.node.hint if values is None else values(size)


def expression(size: Any) -> Any:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def is_of_latest_trace(size: Any) -> bool:
    """Whether a symbolic size belongs to the latest trace with symbols. That of a nested tensor belongs to no trace."""
    own = getattr(size.node, "shape_env", None)
    return own is not None and any(own is env() for env in _LATEST)


def plain_number(size: Any, value: Any) -> Any:
    """The Python number of a sympy number, of the kind of `size`."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next(kind for symbolic, kind in kinds.items() if isinstance(size, symbolic))(value)


def name_of(size: Any) -> str:
    """The formula of a symbolic size as text, with all digits: `2*s1`."""
    import sympy

    expr = size.node.expr
    return str(expr.xreplace({each: sympy.Symbol(repr(float(each))) for each in expr.atoms(sympy.Float)}))


def formula(size: Any) -> Any:
    """The size, or the expression of a symbolic one: comparing formulas assumes nothing of the symbols."""
    return size.node.expr if isinstance(size, SYMBOLIC) else size


def symbols_of(size: Any) -> list[str]:
    """The names of the symbols in a size."""
    return [symbol.name for symbol in size.node.expr.free_symbols] if isinstance(size, SYMBOLIC) else []


def symbol_sizes(size: Any) -> dict[str, Any]:
    """The symbols in a symbolic size, by name, as sizes."""
    env = size.node.shape_env
    symbols = size.node.expr.free_symbols
    return {each.name: env.create_symintnode(each, hint=int(env.backed_var_to_val[each])) for each in symbols}


def is_unknown(value: Any) -> bool:
    """Whether only the data decides a number: it depends on more than the sizes of the inputs."""
    if not isinstance(value, SYMBOLIC):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def largest(size: Any) -> float:
    """The largest number that a size can be which only the data decides; infinite if torch knows of no bound."""
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound.is_Integer else float(bound)


def mode_with_symbols() -> FakeTensorMode:
    """A fake mode in which an export may make sizes of inputs symbols."""
    from torch._functorch import aot_autograd  # noqa: F401  (`aot.fake_mode` says why)
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(tracked_fakes=[])
    _LATEST[:] = [weakref.ref(env)]
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


@contextlib.contextmanager
def export_in(mode: FakeTensorMode) -> Iterator[None]:
    """A context in which `torch.export` makes its fake tensors in `mode`."""
    with tracing(TracingContext(mode)):
        yield


def varying(dims: Sequence[Sequence[int]]) -> dict[str, tuple[dict[int, Any], ...]]:
    """The argument `dynamic_shapes` of an export of `forward(*tensors)`; `dims`: of each tensor, the dimensions that vary."""
    return {"tensors": tuple({dim: torch.export.Dim.AUTO for dim in each} for each in dims)}


def inputs_of(exported: torch.export.ExportedProgram) -> tuple[torch.Tensor, ...]:
    """The fake tensors with which an export has run `forward(*tensors)`."""
    names = exported.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    return tuple(values[str(name)] for name in names)


@dataclass(frozen=True)
class Values:
    """Numbers for the symbols of one graph. Evaluates the graph's sizes; equal sizes are computed once."""

    of_symbols: Mapping[Any, Any]
    _known: dict[Any, Any] = field(default_factory=dict, compare=False)

    def __call__(self, size: Any) -> Any:
        """The number of a size; a plain number as it is."""
        if not isinstance(size, SYMBOLIC):
            return size
        key = type(size), size.node.expr
        if key not in self._known:
            self._known[key] = plain_number(size, size.node.expr.xreplace(self.of_symbols))
        return self._known[key]


@contextlib.contextmanager
def considering(values: Values | None) -> Iterator[None]:
    """A context in which `hint` gives these numbers, so that bytes are counted for them; with None, one that does nothing."""
    token = _CONSIDERED.set(values or _CONSIDERED.get())
    try:
        yield
    finally:
        _CONSIDERED.reset(token)


_LATEST: list[weakref.ref[Any]] = []  # the shape environment of the latest trace with symbols; one thread at a time traces
_CONSIDERED: ContextVar[Values | None] = ContextVar("sizes considered", default=None)


def at_values(value: Any, values: Values) -> Any:
    """A value of a graph with numbers for symbolic sizes; fake tensors in a fake mode of their own."""
    if isinstance(value, list | tuple):
        return type(value)(at_values(each, values) for each in value)
    if not isinstance(value, torch.Tensor):
        return values(value)
    shape, stride = tuple(map(values, value.shape)), tuple(map(values, value.stride()))
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def in_new_mode(values: Sequence[Any], mode: FakeTensorMode) -> tuple[list[Any], Symbols]:
    """Values of a graph, fake tensors and numbers, in a new fake mode with symbols of the same names; and these symbols.

    What a trace in the new mode assumes of sizes stays in the new mode.
    """
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
    """The symbols of one graph and the facts under which the graph holds.

    A trace that compares sizes takes the branch of its example's sizes, and notes the comparison. A graph holds for
    other sizes exactly if every comparison has the same answer. Passes over the graph may add comparisons.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        shapes: Sequence[Sequence[Any]],
        facts: Sequence[Any] = (),
        names: Mapping[Any, Any] | None = None,
    ) -> None:
        """`shapes`: those of the inputs, with symbols. `facts`: comparisons that were read with a written graph.

        `names`: the symbols of another graph, for each of which `mode` has one of its own.
        """
        self._env: Any = mode.shape_env
        self._names = names
        self._closed = [[None if isinstance(size, SYMBOLIC) else size for size in shape] for shape in shapes]
        self._read = tuple(facts)

    @property
    def places(self) -> dict[Any, Place]:
        """The symbols, each with the dimension of the input for which it stands."""
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
        """The comparisons that must hold, as sympy expressions."""
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
        """Whether a comparison has a floating-point number in it, which sympy rounds in another way than Python."""
        import sympy

        return any(fact.atoms(sympy.Float) or _FLOATING & {each.func.__name__ for each in fact.atoms(sympy.Function)}
                   for fact in self.facts)

    @property
    def free(self) -> set[Place]:
        """The dimensions that may vary: those whose size the trace has not fixed."""
        replaced = self._env.replacements
        return {place for symbol, place in self.places.items() if not replaced.get(symbol, symbol).is_number}

    def equalities(self) -> list[tuple[str, FrameSummary | None]]:
        """The comparisons that found sizes equal, as text with the names of the symbols, and the code line of each."""
        found = []
        for guard in self._env.guards:
            if guard.expr.func.__name__ == "Equality":
                left, right = guard.expr.args
                found.append((f"{left} == {right}", guard.sloc.maybe_user_loc or guard.sloc.framework_loc))
        return found

    def values(self, shapes: Sequence[Sequence[int]]) -> Values | None:
        """Numbers for the symbols from the inputs' shapes; None if the graph does not hold for these shapes."""
        import sympy

        if not all(_fits(shape, closed) for shape, closed in zip(shapes, self._closed, strict=True)):
            return None
        values = Values({symbol: sympy.Integer(shapes[index][dim]) for symbol, (index, dim) in self.places.items()})
        return values if self.hold(values) else None

    def hold(self, values: Values) -> bool:
        """Whether every comparison has the answer of the trace for these numbers."""
        numbers = values.of_symbols
        if self._names is not None:
            numbers = {own: numbers[symbol] for symbol, own in self._names.items()}
        return all(fact.xreplace(numbers) == True for fact in self.facts)  # noqa: E712  (sympy's, or Python's)

    # -------------------------------------------------------------------------------------------------- as data

    def written(self) -> dict[str, Any]:
        """Symbols and facts as plain data."""
        env = self._env
        symbols = [
            [symbol.name, f"L['tensors'][{index}].size()[{dim}]", int(env.backed_var_to_val[symbol])]
            for symbol, (index, dim) in self.places.items()
        ]
        return {"shapes": self._closed, "symbols": symbols, "facts": [write_expression(fact) for fact in self.facts]}

    @classmethod
    def read(cls, data: Mapping[str, Any], mode: FakeTensorMode) -> Symbols:
        """Symbols and facts of `written` in a new fake mode. Raises `ValueError` if a symbol gets another name here."""
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
        """A symbolic size from its written expression; `size`: its number in the trace."""
        names = {symbol.name: symbol for symbol in self._env.var_to_sources}
        expr = read_expression(written, names)
        make = self._env.create_symfloatnode if isinstance(size, float) else self._env.create_symintnode
        return make(expr, hint=size)


def _fits(shape: Sequence[int], closed: Sequence[int | None]) -> bool:
    return len(shape) == len(closed) and all(fixed in (None, size) for size, fixed in zip(shape, closed, strict=True))


def _name(source: Any) -> str:
    name = source if isinstance(source, str) else source.name
    return str(name() if callable(name) else name)
