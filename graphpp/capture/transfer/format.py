"""The JSON format of a captured graph: version, tables, names of dtypes and classes.

Contract of `write_graph.py` and `read_graph.py`
--------
- `read_graph(write_graph(captured, ...), ...)` has the same nodes in the same order, with equal names, targets, arguments and
  metadata: all keys that `passes/graph/joint_graph.py` lists, and `original_aten`, from which Inductor names kernels. Values
  become fake tensors of equal shape, strides, offset, dtype and device.
- Reading calls no code that the text names: operators, functions and classes are looked up among those loaded in this process.
- Objects of a process are written by name and looked up on arrival: process groups and constants by their attribute in model
  or loss, the capture's device as "own".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphpp._torch import pytree
from graphpp.runtime import program

FORMAT = 6  # increment for every change of meaning; other formats are not read
PLAIN_META = ("backward", "position", "seq", "checkpoint", "kept")  # plain data, written unchanged
TABLED_META = ("calls", "source")  # each value is written once and shared by nodes
ROLES = {
    kind.__name__: kind
    for kind in (
        program.Parameter, program.Buffer, program.Constant, program.Input, program.Number, program.Seed, program.Size,
        program.Loss, program.Output, program.Metric, program.Gradient, program.BufferUpdate,
    )
}  # fmt: skip
MODULES = ("builtins", "math", "operator", "torch")  # roots of modules whose functions a text may name
IN_JSON = (type(None), bool, int, float, str)  # types that JSON has


def _start_stop_step(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


def _name_in_torch(value: Any) -> list[str]:
    return [str(value).removeprefix("torch.")]


# types that JSON does not have: the kind under which a value is written, and its items
AS_ITEMS: Mapping[type, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    tuple: ("tuple", list),
    torch.Size: ("size", list),
    slice: ("slice", _start_stop_step),
    range: ("range", _start_stop_step),
    complex: ("complex", lambda value: [value.real, value.imag]),
    type(...): ("ellipsis", lambda _: []),
    torch.dtype: ("torch", _name_in_torch),
    torch.layout: ("torch", _name_in_torch),
    torch.memory_format: ("torch", _name_in_torch),
}
OF_ITEMS: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "size": torch.Size,
    "slice": lambda ends: slice(*ends),
    "range": lambda ends: range(*ends),
    "complex": lambda parts: complex(*parts),
    "ellipsis": lambda _: ...,
    "torch": lambda name: getattr(torch, *name),
}


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def registered_class(name: str) -> type | None:
    """The class with this full name in torch's pytree; None if the name is unknown or ambiguous."""
    found = [kind for kind in pytree.registered_classes() if class_name(kind) == name]
    return found[0] if len(found) == 1 else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found
