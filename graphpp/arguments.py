"""Checks of the arguments of public functions, by a table of accepted values.

Contract: a function under `@checked(error, name=COUNT, ...)` raises `error` for an argument that it does not accept, before its
own code runs. The message names the argument, the forms that it takes, and the value that was given. This file imports nothing
of graphpp, so every package may use it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_LONG = 60  # characters of a value that a message shows


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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_possible(path: str | bytes) -> bool:
    return isinstance(path, str) and path != "" and "\0" not in path


COUNT = Accepted("a positive integer up to 2**20", lambda value: _is_int(value) and 1 <= value <= 2**20)  # type: ignore[operator]
INDEX = Accepted("an integer from 0 to 2**20", lambda value: _is_int(value) and 0 <= value <= 2**20)  # type: ignore[operator]
INTEGER = Accepted("an integer", _is_int)
NUMBER = Accepted("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
FLAG = Accepted("True or False", lambda value: isinstance(value, bool))
TEXT = one_of(str, takes="a string")
PATH = Accepted("a path", lambda value: isinstance(value, str | os.PathLike) and _is_possible(os.fspath(value)))
MAPPING = one_of(Mapping, takes="a mapping")
ROWS = Accepted("a list of rows", lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping))


def require(error: type[Exception], name: str, accepted: Accepted, value: object) -> None:
    """Raise `error` for a value that is not accepted."""
    if not accepted.accepts(value):
        raise error(f"{name}: take {accepted.takes}, got {_shown(value)}")


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


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({type(value).__name__})"
