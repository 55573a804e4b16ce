"""Replace attributes of torch and of Python in one thread only, and let one thread at a time change the process.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `_dynamo_marked_constant`: Dynamo calls a function with this attribute instead of tracing it

Contract
--------
- A capture replaces functions, methods and properties of torch, of classes and of builtins while other threads may train. Every
  replacement goes through `replaced`: only the thread that opened the context sees it, also through a name that somebody
  imported (`from module import function`). Other threads pay one more Python call.
- Process-wide state (`gc`, the filters of `warnings`, torch's tracer) is changed under the one lock of `alone`.
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
    with _LOCK:
        yield


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the whole process, under `alone`: graphs and tables make many objects for it to walk."""
    with alone():
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class InThisThread:
    """True in the thread that made it, until `end`; false in every other thread."""

    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def __bool__(self) -> bool:
        return self._thread == threading.get_ident()

    def end(self) -> None:
        self._thread = None


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any, elsewhere: Any = _UNCHANGED) -> Iterator[None]:
    """Set attribute `name` of a module or class to `replacement` in this thread.

    Other threads see `elsewhere`, by default the original. A class attribute may be a function, property, static method or
    value; a module attribute is a function.
    """
    inherited, original = name not in vars(owner), inspect.getattr_static(owner, name, _UNCHANGED)
    original = getattr(owner, name) if original is _UNCHANGED else original  # made by a module's own `__getattr__`
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
    """Every (module, name, value) by which an imported module refers to one of `objects` (given by `id`)."""
    wanted = frozenset(objects)
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    holders = [module for module in modules if not wanted.isdisjoint(map(id, list(vars(module).values())))]
    return [(module, name, value) for module in holders for name, value in list(vars(module).items()) if id(value) in wanted]


def caller() -> CodeType:
    """The code object that uses a replaced attribute; called from a replacement."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code


class _Choice:
    def __init__(self, replacement: Any, elsewhere: Any) -> None:
        self.here, self.replacement, self.elsewhere = InThisThread(), replacement, elsewhere

    def end(self, original: Any) -> None:
        self.elsewhere = original
        self.here.end()

    def chosen(self) -> Any:
        return self.replacement if self.here else self.elsewhere


def _attribute(owner: Any, original: Any, choice: _Choice) -> Any:
    """A function if the original is one, since Dynamo can trace functions; else a descriptor."""
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


class _Attribute:  # a descriptor
    def __init__(self, choice: _Choice) -> None:
        self._choice = choice

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        chosen = self._choice.chosen()
        bind = getattr(type(chosen), "__get__", None)
        return chosen if bind is None else bind(chosen, instance, owner)


class _Property(_Attribute):  # a descriptor with a setter
    def __set__(self, instance: Any, value: Any) -> None:
        chosen = self._choice.chosen()
        type(chosen).__set__(chosen, instance, value)
