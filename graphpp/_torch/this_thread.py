"""Replace attributes of torch and of Python in one thread only, and let one thread at a time change the process.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `_dynamo_marked_constant`, an attribute of functions: Dynamo calls such a function instead of reading its code

Contract
--------
- A capture replaces functions, methods and properties of torch, of classes and of builtins. Other threads may train meanwhile,
  so every replacement goes through `replaced`: the thread that opened the context finds the replacement, and every other
  thread finds the attribute as before. After the context this holds for all threads, also for a function that somebody has
  kept under another name (`from module import function`).
- A replacement costs the other threads the time of one more Python call.
- State that Python and torch keep for the whole process (`gc`, the filters of `warnings`, torch's tracer) has one user at a
  time: `alone` holds the one lock for it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LOCK = threading.RLock()
_UNCHANGED: Any = object()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context that one thread of the process is in at a time; a second thread waits until the first one has left."""
    with _LOCK:
        yield


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context without garbage collection in the whole process, which one thread at a time is in.

    A collection walks over all objects, again and again while graphs and tables grow.
    """
    with alone():
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class InThisThread:
    """A truth value: true in the thread that made it and until `end`, false in every other thread."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def __bool__(self) -> bool:
        return self._thread == threading.get_ident()

    def end(self) -> None:
        """Make the value false in every thread."""
        self._thread = None


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any, elsewhere: Any = _UNCHANGED) -> Iterator[None]:
    """A context in which this thread finds `replacement` as the attribute `name` of a module or class.

    All other threads find `elsewhere`, which is the attribute itself unless it is given. The attribute of a class may be a
    function, a property, a static method or a value; the attribute of a module is a function.
    """
    inherited, original = name not in vars(owner), inspect.getattr_static(owner, name)
    choice = _Choice(replacement, original if elsewhere is _UNCHANGED else elsewhere)
    attribute = _attribute(owner, original, choice)
    setattr(owner, name, attribute)
    try:
        yield
    finally:
        choice.end(original)
        if vars(owner).get(name) is attribute:  # another thread may have set the attribute meanwhile
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def found_in_modules(objects: Collection[int]) -> list[tuple[ModuleType, str, Any]]:
    """Every module, name and value with which an imported module holds one of `objects`, which are identities (`id`).

    Most modules hold none, and `isdisjoint` leaves them out without a step of Python for each of their values.
    """
    wanted = frozenset(objects)
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    holders = [module for module in modules if not wanted.isdisjoint(map(id, list(vars(module).values())))]
    return [(module, name, value) for module in holders for name, value in list(vars(module).items()) if id(value) in wanted]


def caller() -> CodeType:
    """The code that uses a replaced attribute; called from a replacement."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code


class _Choice:
    def __init__(self, replacement: Any, elsewhere: Any) -> None:
        self.here, self.replacement, self.elsewhere = InThisThread(), replacement, elsewhere

    def end(self, original: Any) -> None:
        """Choose the original attribute in every thread from now on."""
        self.elsewhere = original
        self.here.end()

    def chosen(self) -> Any:
        return self.replacement if self.here else self.elsewhere


def _attribute(owner: Any, original: Any, choice: _Choice) -> Any:
    """A function where the original is one, since Dynamo can read functions; else a descriptor."""
    if isinstance(owner, ModuleType) or isinstance(original, FunctionType):
        return _function(original, choice)
    return (_Property if hasattr(type(original), "__set__") else _Attribute)(choice)


def _function(original: Callable[..., Any], choice: _Choice) -> Callable[..., Any]:
    replacement = choice.replacement

    def is_here() -> bool:
        return bool(choice.here)

    is_here._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (replacement if is_here() else choice.elsewhere)(*args, **kwargs)

    return choose


class _Attribute:
    """A descriptor that behaves as one descriptor or value in one thread, and as another one in all other threads."""

    def __init__(self, choice: _Choice) -> None:
        self._choice = choice

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        chosen = self._choice.chosen()
        bind = getattr(type(chosen), "__get__", None)
        return chosen if bind is None else bind(chosen, instance, owner)


class _Property(_Attribute):
    """The same for descriptors that can be assigned to."""

    def __set__(self, instance: Any, value: Any) -> None:
        chosen = self._choice.chosen()
        type(chosen).__set__(chosen, instance, value)
