"""Checks of the arguments of public functions, by a table of accepted values.

Contract: a function under `@checked(error, name=COUNT, ...)` raises `error` for an argument that it does not accept, before its
own code runs. The message names the argument, the forms that it takes, and the value that was given. A function that the caller
gave as an argument runs through `callback`: its exception becomes the cause of `error`, and its results are checked. This file
imports nothing of graphpp but the base of the errors, and no torch, so every package may use it.
"""

from __future__ import annotations

import functools
import inspect
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

from graphpp.errors import GraphPPError

P = ParamSpec("P")
R = TypeVar("R")
_LONG = 60  # characters of a value that a message shows
_REPR = reprlib.Repr()  # of a container the first items only
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 1000


class Accepted(NamedTuple):
    """The values that an argument may have: in words, and as a test."""

    takes: str
    accepts: Callable[[object], bool]


def one_of(*types: type, takes: str) -> Accepted:
    """Objects of some classes."""
    return Accepted(takes, lambda value: isinstance(value, types))


def one_word(*words: str) -> Accepted:
    """One of some strings."""
    return Accepted(" or ".join(map(repr, words)), lambda value: isinstance(value, str) and value in words)


def or_none(accepted: Accepted) -> Accepted:
    """Accepted values, and None."""
    return Accepted(f"{accepted.takes}, or None", lambda value: value is None or accepted.accepts(value))


def positive_up_to(bits: int) -> Accepted:
    """Counts: integers from 1 to 2**`bits`."""
    return Accepted(f"a positive integer up to 2**{bits}", lambda value: _is_int(value) and 1 <= value <= 2**bits)  # type: ignore[operator]


def function_of(arguments: str) -> Accepted:
    """Functions and other objects that can be called; a class is none. `arguments`: the arguments in words."""
    return Accepted(f"a function of {arguments}", lambda value: callable(value) and not isinstance(value, type))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_possible(path: str | bytes) -> bool:
    return isinstance(path, str) and path != "" and "\0" not in path


COUNT = positive_up_to(20)
INDEX = Accepted("an integer from 0 to 2**20", lambda value: _is_int(value) and 0 <= value <= 2**20)  # type: ignore[operator]
INTEGER = Accepted("an integer", _is_int)
NUMBER = Accepted("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
SECONDS = Accepted(
    "a number of seconds from 0 to 1e9",
    lambda value: isinstance(value, Real) and not isinstance(value, bool) and 0 <= value <= 1e9,  # type: ignore[operator,unreachable]
)
FLAG = Accepted("True or False", lambda value: isinstance(value, bool))
TEXT = one_of(str, takes="a string")
PATH = Accepted("a path", lambda value: isinstance(value, str | os.PathLike) and _is_possible(os.fspath(value)))
BYTES = positive_up_to(62)
FUNCTION = Accepted("a function", callable)
MAPPING = one_of(Mapping, takes="a mapping")
ROWS = Accepted("a list of rows", lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping))


def require(error: type[Exception], name: str, accepted: Accepted, value: object) -> None:
    """Raise `error` for a value that is not accepted."""
    if not accepted.accepts(value):
        raise error(f"{name}: {refusal(accepted, value)}")


def refusal(accepted: Accepted, value: object) -> str:
    """The accepted values, and the value that is none of them, in words."""
    return f"take {accepted.takes}, got {shown(value)}"


def checked(error: type[Exception], **arguments: Accepted) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: raise `error` for arguments that are not accepted; an argument that is left out is not checked."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments
            for name, accepted in arguments.items():
                if name in given:
                    require(error, name, accepted, given[name])
            return function(*args, **kwargs)

        return run

    return decorate


def callback(error: type[Exception], name: str, returns: Accepted, function: Callable[..., Any]) -> Callable[..., Any]:
    """The caller's `function`, given as the argument `name`: a call raises `error` where the function fails.

    The function's own exception is the cause of `error`; a `GraphPPError` comes through as it is. A result that `returns` does
    not accept raises `error` too.
    """
    title = f"{name}: the function {getattr(function, '__qualname__', type(function).__qualname__)}"

    def run(*args: Any) -> Any:
        try:
            result = function(*args)
        except GraphPPError:
            raise
        except Exception as fault:
            raise error(f"{title} raised {type(fault).__name__}: {fault}{_line_of(fault)}") from fault
        if not returns.accepts(result):
            raise error(f"{title} must return {returns.takes}, but returned {shown(result)}")
        return result

    return run


def unfit(function: Callable[..., Any], count: int) -> str | None:
    """Why a function cannot be called with `count` positional arguments; None if it can, or tells no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins
        return None
    try:
        signature.bind(*(None,) * count)
    except TypeError as fault:
        return str(fault)
    return None


def _line_of(fault: Exception) -> str:
    """The line that raised, below the frame of `callback`; empty if the function could not even be called."""
    frames = traceback.extract_tb(fault.__traceback__)[1:]
    return f"\n  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def type_name(value: object) -> str:
    """The name of a value's type; a class as such."""
    return shown(value) if isinstance(value, type) else type(value).__name__


def _shown_class(value: type) -> str:
    name, public = value.__name__, sys.modules["graphpp"]
    if name not in public.__all__ or getattr(public, name) is not value:
        return f"the class {name}, not an object of it"
    return f"the class graphpp.{name}: give graphpp.{name}({'' if unfit(value, 0) is None else '...'})"


def shown(value: object) -> str:
    """The beginning of a value's `repr`, on one line.

    A tensor is shown by its shape and dtype, a class with the remark that it is no object.
    """
    if isinstance(value, type):
        return _shown_class(value)
    torch = sys.modules.get("torch")  # without it there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    try:
        text = " ".join(_REPR.repr(value).split())
    except Exception:  # `repr` runs the code of the value's class
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({type(value).__name__})"
