"""Replace symbolic sizes that a traced forward left in the program's objects by numbers.

Contract: after a trace with symbols, `take_back` finds symbolic sizes in lists, deques, dicts, closures and attributes of
objects and classes outside of torch, and replaces them by the traced sizes, as an eager run would have left them.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import CellType, MemberDescriptorType
from typing import Any

from torch import fx

from graphpp._torch.symbols import SYMBOLIC, hint, is_of_latest_trace

_OF_TRACES = ("torch", "sympy", "graphpp")
_OWN = 3  # references to a symbol in `take_back`: a list, a variable, an argument


def take_back() -> str | None:
    """Replace symbols of the latest trace in objects of the program; returns the class of one such object, or None."""
    gc.collect()  # unused frames and nodes of the trace
    objects = gc.get_objects()
    alive = [each for each in objects if type(each) in SYMBOLIC and is_of_latest_trace(each)]
    known, counts = _in_graphs((each for each in objects if type(each) is fx.Node), set(map(id, alive)))
    del objects
    held = [each for each in alive if sys.getrefcount(each) - _OWN > counts[id(each)]]
    del alive
    tuples = [each for each in gc.get_referrers(*held) if type(each) is tuple and id(each) not in known] if held else []
    known |= {id(held), id(tuples)}
    found = None
    for values in (held, tuples):
        for holder in gc.get_referrers(*values) if values else ():
            if id(holder) not in known and _is_of_program(holder):
                found = found or type(holder).__qualname__
                _put_numbers(holder, {id(value) for value in values})
    return found


def _in_graphs(nodes: Iterable[fx.Node], symbols: set[int]) -> tuple[set[int], Counter[int]]:
    """The `id`s of containers with metadata of graph nodes, and how often these refer to each symbol.

    Searching the referrers of all symbols instead would compare every reference in the process with every symbol.
    """
    pending: list[Any] = [part for node in nodes for part in (node.meta, node.args, node.kwargs)]
    known, counts = set(map(id, pending)), Counter[int]()
    while pending:
        for each in gc.get_referents(pending.pop()):
            if id(each) in symbols:
                counts[id(each)] += 1
            elif isinstance(each, dict | list | tuple) and id(each) not in known:
                known.add(id(each))
                pending.append(each)
    return known, counts


def _is_of_program(holder: Any) -> bool:
    """Whether an object can keep a size for the program."""
    if isinstance(holder, list | deque | dict | CellType):
        return True
    has_attributes = hasattr(holder, "__dict__") or any(_slots(type(holder)))
    return has_attributes and type(holder).__module__.partition(".")[0] not in _OF_TRACES


def _put_numbers(holder: Any, values: set[int]) -> None:
    if isinstance(holder, CellType):
        holder.cell_contents = _number(holder.cell_contents)
    elif isinstance(holder, list | deque):
        for index, value in enumerate(holder):
            if id(value) in values:
                holder[index] = _number(value)
    elif isinstance(holder, dict):
        _put_numbers_in_dict(holder, values)
    else:
        _put_numbers(getattr(holder, "__dict__", {}), values)
        for slot in _slots(type(holder)):
            if id(getattr(holder, slot.__name__, None)) in values:
                slot.__set__(holder, _number(slot.__get__(holder)))


def _put_numbers_in_dict(holder: dict[Any, Any], values: set[int]) -> None:
    """Replace values in a dict. Python caches class attributes, so they are set on the class."""
    of_class = next((each for each in gc.get_referrers(holder) if isinstance(each, type)), None)
    for key, value in list(holder.items()):
        if id(value) in values and of_class is not None:
            type.__setattr__(of_class, key, _number(value))
        elif id(value) in values:
            holder[key] = _number(value)


def _slots(kind: type) -> Iterator[Any]:
    """The slots of classes written in Python."""
    declaring = (vars(base) for base in kind.__mro__ if "__slots__" in vars(base))
    return (each for names in declaring for each in names.values() if isinstance(each, MemberDescriptorType))


def _number(value: Any) -> Any:
    return tuple(map(hint, value)) if type(value) is tuple else hint(value)
