"""Write a rendered graph as a Python file that runs with torch alone, or with graphpp where the graph calls its operators.

Contract: the file contains the text that the pipeline runs, unchanged, and defines the objects that the pipeline binds. Its
docstring names the pass that made the text, and objects or libraries that the file lacks. Its `main` makes inputs of the right
shape, strides, dtype and device, runs the text, and prints the results' names, dtypes and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import fx

from graphpp._torch.numbers_of_data import has_unknown_size
from graphpp._torch.symbols import hint
from graphpp.passes.text.naming import PythonNames
from graphpp.passes.text.render import RenderedGraph, code, define, docstring, format_role

_OWN = {"_c10d_functional", "aten", "c10d", "debugprims", "higher_order", "inductor", "mkldnn", "prim", "prims",
        "quantized", "quantized_decomposed", "rngprims", "symm_mem", "torch", "xpu"}  # fmt: skip
_DEFINING = (
    "from graphpp._torch.operators import (  # noqa: F401 (they define torch.ops.graphpp)\n"
    "    flex_attention, linear_cross_entropy, packed_attention, recurrence,\n)\n\n"
)

_MAIN = '''


# -------------------------------------------------- example inputs, so that this file runs by itself

INPUTS = [  # name, shape, strides, dtype, device; or name, value{inputs}
]
RESULTS = [{results}
]


def example(shape, strides, dtype, home, device):
    """Random numbers in [0, 1) of a fixed seed for floating dtypes; zeros for others, valid as indices and masks."""
    size = 0 if 0 in shape else 1 + sum((length - 1) * step for length, step in zip(shape, strides))
    if dtype.is_complex:
        memory = torch.rand(size, dtype=torch.complex64)
    else:
        memory = torch.rand(size) if dtype.is_floating_point else torch.zeros(size)
    return memory.to(dtype).to(device or home).as_strided(shape, strides)


def inputs(device=None):
    """Example inputs for `run`, the same every time, on `device`; None: where the graph was captured for."""
{prelude}    torch.manual_seed(0)
    return [facts[0] if len(facts) == 1 else example(*facts, device) for _, *facts in INPUTS]


def main(device=None):
    with torch.no_grad():
        results = run(inputs(device))
    for name, result in zip(RESULTS, results):
        print(f"{{name}}: {{str(result.dtype).removeprefix('torch.')}}{{list(result.shape)}}")


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:2])
'''


@dataclass(frozen=True)
class Origin:
    title: str
    made_by: str
    seconds: float
    file: str


@dataclass
class _Bound:
    definitions: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def define(self, name: str, value: Any) -> None:
        try:
            self.definitions.append(define(name, value))
        except TypeError as fault:
            self.definitions.append(f"{name} = None  # cannot be spelled: {fault}")
            self.missing.append(f"{name}, which cannot be spelled: {fault}")

    def input(self, name: str, node: fx.Node) -> str:
        """One example input as Python: its name, shape, strides, dtype and device; or its name and value."""
        value = node.meta.get("val")
        if has_unknown_size(value):
            self.missing.append(f"{name}, whose size only the data decides")
        if isinstance(value, torch.Tensor):
            shape, stride = (tuple(map(hint, sizes)) for sizes in (value.shape, value.stride()))
            return repr((name, shape, stride, value.dtype, str(value.device)))
        value = hint(value)
        if not isinstance(value, int | float):
            self.missing.append(f"{name}, which is a {type(value).__name__}")
        return repr((name, value if isinstance(value, int | float) else None))


def standalone(graph: fx.Graph, rendered: RenderedGraph, origin: Origin) -> str:
    bound = _Bound()
    for name, value in rendered.bindings.items():
        bound.define(name, value)
    bound.missing += [f"{name}, a process group of the run" for name in rendered.groups]
    names = PythonNames(graph).values  # not in the order of the graph
    inputs = [bound.input(names[node], node) for node in graph.find_nodes(op="placeholder")]
    main = _MAIN.format(
        inputs=_listed(inputs),
        results=_listed(map(repr, _results(graph))),
        prelude=_prelude(bound.missing, rendered.devices),
    )
    foreign = sorted(set(re.findall(r"torch\.ops\.(\w+)\.", rendered.text)) - _OWN)  # namespaces that torch does not define
    defining = _DEFINING if "graphpp" in foreign else ""
    head = docstring(_header(origin, bound.missing, foreign))
    future = "from __future__ import annotations\n\n" if bound.definitions else ""
    return f"{head}\n\n{future}{defining}" + "\n\n\n".join([code(rendered.text).rstrip(), *bound.definitions]) + main


def _listed(items: Iterable[str]) -> str:
    return "".join(f"\n    {item}," for item in items)


def _prelude(missing: list[str], devices: tuple[str, ...]) -> str:
    lines = [f"raise SystemExit({f'cannot run by itself, needs {missing[0]}'!r})"] if missing else []
    if devices:
        lines += ["if device:", f"    globals().update(dict.fromkeys({list(devices)}, torch.device(device)))"]
    return "".join(f"    {line}\n" for line in lines)


def _header(origin: Origin, missing: list[str], foreign: list[str]) -> str:
    try:
        version = metadata.version("graphpp")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    lines = [
        origin.title,
        "",
        f"pass      {origin.made_by}, {1000 * origin.seconds:.1f} ms",
        f"versions  torch {torch.__version__}, graphpp {version}",
        f"run       python {origin.file} [device]",
    ]
    lines += [f"needs     {needed}: this file cannot run" for needed in missing]
    lines += [f"needs     the library that defines torch.ops.{name}: import it first" for name in foreign if name != "graphpp"]
    lines += ["needs     graphpp, whose operators it calls"] * ("graphpp" in foreign)
    return "\n".join([*lines, ""])


def _results(graph: fx.Graph) -> list[str]:
    """The results' names: `loss`, `gradient of layers.0.wq.weight`, `sent mm_4`; the node's name without a role."""
    end = graph.output_node()
    names = [str(value) for value in end.args[0]]  # type: ignore[union-attr]
    roles = [format_role(role) for role in end.meta.get("roles", ())] or [""] * len(names)
    named = ("", "sent", "saved")
    return [f"{role} {name}".strip() if role in named else role for role, name in zip(roles, names, strict=True)]
