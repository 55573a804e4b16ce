"""Sympy expressions of sizes as plain data: `read_expression(write_expression(expr))` equals `expr`.

Private name, checked on torch 2.13.0 and 2.15.0: `torch.utils._sympy.functions`. Reading calls only `_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def write_expression(expr: Any) -> Any:
    """A sympy expression as nested lists [function name, *arguments]. Raises `ValueError` for unknown functions."""
    if expr.is_Symbol:
        return expr.name
    if expr.is_Boolean and not expr.args:
        return bool(expr)
    if expr.is_Integer:
        return int(expr)
    if expr.is_Float:
        return {"float": float(expr).hex()}
    name = expr.func.__name__
    if _functions().get(name) is not expr.func:
        raise ValueError(f"a size is computed by {name}")
    return [name, *map(write_expression, expr.args)]


def read_expression(written: Any, names: Mapping[str, Any]) -> Any:
    import sympy

    match written:
        case bool():
            return sympy.true if written else sympy.false
        case int():
            return sympy.Integer(written)
        case str():
            return names[written]
        case {"float": text}:
            return sympy.Float(float.fromhex(text))
    name, *arguments = written
    return _functions()[name](*(read_expression(each, names) for each in arguments))


def _functions() -> Mapping[str, Callable[..., Any]]:
    import sympy
    from torch.utils._sympy import functions

    own = {name: getattr(functions, name) for name in functions.__all__}
    general = (
        sympy.Add, sympy.Mul, sympy.Pow, sympy.Rational, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge,
        sympy.And, sympy.Or, sympy.Not, sympy.Piecewise, functions.Max, functions.Min,
        sympy.functions.elementary.piecewise.ExprCondPair,
    )  # fmt: skip
    return {each.__name__: each for each in general} | {
        each.__name__: each for each in own.values() if isinstance(each, type)
    }
