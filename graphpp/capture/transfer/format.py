"""The format in which a captured graph is written as JSON: its version, its tables, and names of dtypes and classes.

`write_graph.py` and `read_graph.py` share this file. Contract of both
--------
- `read_graph(write_graph(captured, ...), ...)` has the same nodes in the same order, with equal names, targets, arguments and
  metadata: all keys that `passes/graph/joint_graph.py` lists, and `original_aten`, from which Inductor names kernels. Values
  become fake tensors of equal shape, strides, offset, dtype and device.
- The text is data: to read it calls no code that the text names. Operators, functions and classes are looked up among those
  that this process has.
- Objects of one process are written by name and looked up by this name on arrival: a process group by the attribute of the
  model or the loss that holds the group, a constant by the attribute that holds the tensor, the capture's device as "own".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphpp._torch import pytree
from graphpp.runtime import program

FORMAT = 5  # raise for every change of the text's meaning: texts of another format are not read
PLAIN_META = ("backward", "position", "seq", "checkpoint", "kept")  # plain data, written as such
TABLED_META = ("calls", "source")  # written once for all nodes that share the value
ROLES = {
    kind.__name__: kind
    for kind in (
        program.Parameter, program.Buffer, program.Constant, program.Input, program.Seed, program.Size,
        program.Loss, program.Output, program.Metric, program.Gradient, program.BufferUpdate,
    )
}  # fmt: skip
MODULES = ("builtins", "math", "operator", "torch")  # the roots of the modules whose functions a text may name
IN_JSON = (type(None), bool, int, float, str)  # the types of plain data that JSON has


def _start_stop_step(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


def _name_in_torch(value: Any) -> list[str]:
    return [str(value).removeprefix("torch.")]


# plain data that JSON does not have: the kind under which a value is written, and the items of which the value is made
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
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def registered_class(name: str) -> type | None:
    """The class of this full name in torch's pytree; of several classes with one name none."""
    found = [kind for kind in pytree.registered_classes() if class_name(kind) == name]
    return found[0] if len(found) == 1 else None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found
