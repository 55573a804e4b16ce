"""Find symbols that a forward has left in the program's own objects, and put numbers in their place.

Contract: after a trace with symbols, `take_back` looks for symbolic sizes of the trace in lists, dicts, closures and attributes
of objects outside of torch, and puts the number of the traced sizes there. A later run of the program then finds what an eager
run on the traced microbatch would have left.
"""

from __future__ import annotations

import gc
from types import CellType
from typing import Any

from graphpp._torch.symbols import SYMBOLIC, hint, is_of_latest_trace

_OF_TRACES = ("torch", "sympy", "graphpp")


def take_back() -> str | None:
    """Replace the symbols of the latest trace that objects of the program hold; returns the class of one of them, or None."""
    gc.collect()  # frames and nodes of the trace that nothing needs any more
    alive = [each for each in gc.get_objects() if type(each) in SYMBOLIC and is_of_latest_trace(each)]
    tuples = [each for each in gc.get_referrers(*alive) if type(each) is tuple] if alive else []
    known = {id(each) for each in (alive, tuples)}
    found = None
    for values in (alive, tuples):
        for holder in gc.get_referrers(*values) if values else ():
            if id(holder) not in known and _is_of_program(holder):
                found = found or type(holder).__qualname__
                _put_numbers(holder, {id(value) for value in values})
    return found


def _is_of_program(holder: Any) -> bool:
    """Whether an object is no part of a graph or of torch."""
    if type(holder) is dict:
        return "val" not in holder and "tensor_meta" not in holder  # metadata of a node
    if type(holder) in (list, CellType):
        return True
    return hasattr(holder, "__dict__") and type(holder).__module__.partition(".")[0] not in _OF_TRACES


def _put_numbers(holder: Any, values: set[int]) -> None:
    """Replace these values in an object by their numbers."""
    if type(holder) is CellType:
        holder.cell_contents = _number(holder.cell_contents)
        return
    items = holder if isinstance(holder, dict | list) else vars(holder)
    for key, value in enumerate(items) if isinstance(items, list) else list(items.items()):
        if id(value) in values:
            items[key] = _number(value)


def _number(value: Any) -> Any:
    return tuple(map(hint, value)) if type(value) is tuple else hint(value)
