"""Checks of the arguments of public functions, by a table of accepted values.

A function under `@checked(error, name=COUNT, ...)` raises `error` for an argument that is not accepted, before its own code
runs. The message names the argument, the accepted forms, and the given value. `callback` wraps a function from the caller: its
exception becomes the cause of `error`, and its results are checked. This file imports no torch, so every package may use it.
"""

from __future__ import annotations

import functools
import inspect
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from graphpp.errors import GraphPPError

P = ParamSpec("P")
R = TypeVar("R")
_LONGEST_NAME = 255  # bytes
_LONG = 60  # characters of a value that a message shows
_REPR = reprlib.Repr()  # of a container the first items only
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 1000


class Accepted(NamedTuple):
    """The values that an argument may have: in words, and as a test."""

    takes: str
    accepts: Callable[[object], bool]


def one_of(*types: type, takes: str) -> Accepted:
    return Accepted(takes, lambda value: isinstance(value, types))


def one_word(*words: str) -> Accepted:
    return Accepted(" or ".join(map(repr, words)), lambda value: isinstance(value, str) and value in words)


def or_none(accepted: Accepted) -> Accepted:
    return Accepted(f"{accepted.takes}, or None", lambda value: value is None or accepted.accepts(value))


def positive_up_to(bits: int) -> Accepted:
    """Integers from 1 to 2**`bits`."""
    return Accepted(f"a positive integer up to 2**{bits}", lambda value: _is_int(value) and 1 <= value <= 2**bits)  # type: ignore[operator]


def function_of(arguments: str) -> Accepted:
    """Functions and other callables, but no classes. `arguments`: the arguments in words."""
    return Accepted(f"a function of {arguments}", lambda value: callable(value) and not isinstance(value, type))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_possible(path: str | bytes) -> bool:
    """Whether a file system may have such a path: its names have 1 to 255 bytes, none of which is 0."""
    if not isinstance(path, str) or path == "" or "\0" in path:
        return False
    return all(len(name.encode(errors="surrogatepass")) <= _LONGEST_NAME for name in path.split(os.sep))


def _is_iterable(value: object) -> bool:
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:  # also of a tensor or array without dimensions
        return False
    return not isinstance(value, str | bytes | Mapping)


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
ROWS = Accepted("a list of rows", _is_iterable)


def require(error: type[Exception], name: str, accepted: Accepted, value: object) -> None:
    if not accepted.accepts(value):
        raise error(f"{name}: {refusal(accepted, value)}")


def refusal(accepted: Accepted, value: object) -> str:
    """The accepted values and the refused one, in words."""
    return f"take {accepted.takes}, got {shown(value)}"


def checked(error: type[Exception], **arguments: Accepted) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: raise `error` for arguments that are not accepted. Omitted arguments are not checked."""

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
    """The caller's `function`, given as the argument `name`; raises `error` if it fails or returns a value not in `returns`.

    The function's own exception is the cause of `error`; a `GraphPPError` passes unchanged.
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


def unfit(function: Callable[..., Any], count: int, named: Mapping[str, Any] | None = MappingProxyType({})) -> str | None:
    """Why a function cannot be called with `count` positional arguments and these keyword arguments.

    None if it can, or if its signature is unknown. `named=None`: others may follow by keyword.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins
        return None
    try:
        (signature.bind_partial if named is None else signature.bind)(*(None,) * count, **(named or {}))
    except TypeError as fault:
        return str(fault)
    return None


def _line_of(fault: Exception) -> str:
    """The line that raised, below the frame of `callback`; empty if the function could not even be called."""
    frames = traceback.extract_tb(fault.__traceback__)[1:]
    return f"\n  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def type_name(value: object) -> str:
    """The name of a value's type; for a class: that the value is a class."""
    return shown(value) if isinstance(value, type) else type(value).__name__


def _shown_class(value: type) -> str:
    name, public = value.__name__, sys.modules["graphpp"]
    if name not in public.__all__ or getattr(public, name) is not value:
        return f"the class {name}, not an object of it"
    return f"the class graphpp.{name}: give graphpp.{name}({'' if unfit(value, 0) is None else '...'})"


def shown(value: object) -> str:
    """The beginning of a value's `repr`, on one line; for a tensor shape and dtype; for a class the remark that it is one."""
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
