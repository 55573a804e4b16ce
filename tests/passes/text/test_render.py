"""Rendered text computes the graph's results, and holds each value until its last use and no longer."""

import ast
import enum
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from graphpp.passes.text.naming import python_name
from graphpp.passes.text.render import define, render
from graphpp.runtime import program
from graphpp.runtime.random_keys import seeded

aten = torch.ops.aten


class Rows(enum.IntEnum):
    """An int whose repr is no literal."""

    FIRST = 0


def shifted(x: Tensor) -> Tensor:
    """A function that its name leads to."""
    return x + 1


def nameless(x: Tensor) -> Tensor:
    """A function whose name leads to another function."""
    return x - 1


nameless.__name__ = "shifted"

# ---------------------------------------------------------------------------------------------- random graphs of [2, 3]

FLOATS = [0.0, -0.0, 1.5, 3e38, 5e-324, -1e-5, math.inf, -math.inf, math.nan]
ODD_NAMES = ["run", "boxed", "take", "torch", "class", "lambda", "float", "slice", "_aten_sin_default", "_device_0", "_bound_0"]
ROLES = [
    program.Parameter("layers.0.weight"),
    program.Parameter("1.weight"),
    program.Parameter("class"),
    program.Buffer("sin"),
    program.Buffer("layers_0.weight"),
    program.Input("kwargs['x'][0]"),
    program.Constant("_tensor_constant0"),
    program.Seed(),
    program.Received("add"),
    None,
]

# Each makes a node [2, 3] from the graph, two values [2, 3] and a float.
Step = Callable[[fx.Graph, fx.Node, fx.Node, float], fx.Node]
STEPS: dict[str, Step] = {
    "kwargs": lambda g, a, b, x: g.call_function(aten.add.Tensor, (a, b), {"alpha": x}),
    "number": lambda g, a, b, x: g.call_function(aten.mul.Tensor, (a, x)),
    "limits": lambda g, a, b, x: g.call_function(aten.clamp.default, (a, -math.inf), {"max": math.inf}),
    "created": lambda g, a, b, x: g.call_function(
        aten.full.default,
        ([2, 3], x),
        {"dtype": torch.float32, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False},
    ),
    "dtype": lambda g, a, b, x: g.call_function(
        aten._to_copy.default,
        (g.call_function(aten._to_copy.default, (a,), {"dtype": torch.bfloat16}),),
        {"dtype": torch.float32, "memory_format": torch.preserve_format},
    ),
    "layout": lambda g, a, b, x: g.call_function(aten.clone.default, (a,), {"memory_format": torch.contiguous_format}),
    "complex": lambda g, a, b, x: g.call_function(
        aten.real.default, (g.call_function(aten.mul.Tensor, (a, complex(x, -0.0))),)
    ),
    "slices": lambda g, a, b, x: g.call_function(
        operator.getitem, (g.call_function(aten.cat.default, ([a, b], -2)), (slice(1, None, 2), slice(None)))
    ),
    "ellipsis": lambda g, a, b, x: g.call_function(
        operator.getitem, (g.call_function(operator.getitem, (a, (..., None))), (..., 0))
    ),
    "nothing": lambda g, a, b, x: g.call_function(aten.index.Tensor, (a, [None, torch.tensor([2, 0, 1])])),
    "item": lambda g, a, b, x: g.call_function(
        aten.add.Tensor, (a, g.call_function(operator.getitem, (g.call_function(aten.split.Tensor, (b, 1)), -1)))
    ),
    "keyword": lambda g, a, b, x: g.call_function(aten.uniform.default, (a,), {"from": 2.0, "to": 2.0}),
    "enum": lambda g, a, b, x: g.call_function(
        aten.add.Tensor, (a, g.call_function(aten.select.int, (b, Rows.FIRST, Rows.FIRST)))
    ),
    "operator": lambda g, a, b, x: g.call_function(operator.sub, (a, b)),
    "torch": lambda g, a, b, x: g.call_function(torch.where, (g.call_function(torch.isnan, (a,)), a, b)),
    "nn": lambda g, a, b, x: g.call_function(torch.nn.functional.softplus, (a,)),
    "module": lambda g, a, b, x: g.call_function(shifted, (a,)),
    "object": lambda g, a, b, x: g.call_function(nameless, (a,)),
    "lambda": lambda g, a, b, x: g.call_function(lambda a, b: a * b, (a, b)),
    "random": lambda g, a, b, x: g.call_function(seeded, (3, 1, aten.rand_like.default, a)),
    "unused": lambda g, a, b, x: (g.call_function(aten.cos.default, (b,)), a)[1],
}


@st.composite
def graphs(draw: st.DrawFn) -> fx.Graph:
    """A random graph of a few inputs, up to eight operations and up to three results."""
    graph = fx.Graph()
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=4, unique=True))
    values = []
    for role in roles:
        values.append(graph.placeholder(draw(st.sampled_from(["x", "add", "class"]))))
        values[-1].meta = {} if role is None else {"role": role}
    for name in draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=8)):
        picked = [draw(st.sampled_from(values)) for _ in range(2)]
        values.append(STEPS[name](graph, *picked, draw(st.sampled_from(FLOATS))))
        if draw(st.booleans()) and values[-1].op != "placeholder":
            values[-1]._rename(draw(st.sampled_from(ODD_NAMES)))
    graph.output(tuple(draw(st.lists(st.sampled_from(values), max_size=3))))
    return graph


def interpreted(graph: fx.Graph, inputs: list[Tensor]) -> Any:
    """The graph's results, computed node by node."""
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in (node for node in graph.nodes if node.op == "call_function"):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    return fx.node.map_arg(graph.output_node().args[0], values.__getitem__)


def inputs_of(graph: fx.Graph) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=generator) for _ in graph.find_nodes(op="placeholder")]


@given(graphs())
def test_text_computes_what_the_graph_computes(graph: fx.Graph) -> None:
    boxed = inputs_of(graph)
    expected = interpreted(graph, list(boxed))
    results = render(graph).load("<a graph>")(boxed)
    assert isinstance(results, tuple)
    assert not boxed or not graph.find_nodes(op="placeholder")
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


@given(graphs())
def test_every_name_is_deleted_at_its_last_use(graph: fx.Graph) -> None:
    function = next(item for item in ast.parse(render(graph).text).body if isinstance(item, ast.FunctionDef))
    reads, writes, deletes = ({} for _ in range(3))  # type: dict[str, list[int]]
    kinds = {ast.Load: reads, ast.Store: writes, ast.Del: deletes}
    for item in (item for item in ast.walk(function) if isinstance(item, ast.Name)):
        kinds[type(item.ctx)].setdefault(item.id, []).append(item.lineno)
    end = function.body[-1].lineno
    for name, lines in writes.items():
        assert len(lines) == 1, f"{name} is two values"
        last = max(reads.get(name, lines))
        if last >= end:
            assert name not in deletes
        elif any(isinstance(item, ast.Tuple) and item.lineno <= last <= item.end_lineno for item in ast.walk(function)):
            assert name in deletes  # an input without a reader
        else:
            assert deletes[name] == [last]


class Watcher:
    """Makes values and counts the values that are alive."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []

    def make(self, x: Tensor) -> Tensor:
        result = x + 1
        self.made.append(weakref.ref(result))
        return result

    def living(self, _: Tensor) -> list[bool]:
        return [ref() is not None for ref in self.made]


def test_a_value_dies_after_its_last_use_inputs_included() -> None:
    watcher, graph = Watcher(), fx.Graph()
    values = [graph.placeholder("x")]
    for _ in range(4):
        values.append(graph.call_function(watcher.make, (values[-1],)))
    graph.call_function(watcher.make, (values[-1],))  # unused
    first = graph.call_function(watcher.living, (values[-1],))
    second = graph.call_function(watcher.living, (values[0],))
    graph.output((first, second, values[2]))
    boxed = [watcher.make(torch.zeros(2))]
    first_seen, second_seen, result = render(graph).load("<watched>")(boxed)
    assert first_seen == [True, False, True, False, True, False]  # x, v1, v2 (a result), v3, v4, unused
    assert second_seen == [True, False, True, False, False, False]
    del result
    assert not any(watcher.living(torch.zeros(0)))


def test_a_gradient_is_handed_over_once_nobody_reads_it() -> None:
    watcher, graph = Watcher(), fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(watcher.make, (x,)) for _ in range(2))
    reader = graph.call_function(watcher.make, (first,))
    graph.call_function(watcher.living, (x,))
    end = graph.output((second, first, reader, reader))
    second._rename("take")  # as the operator of that name would be
    roles = [program.Gradient("b"), program.Gradient("a"), program.Gradient("tied"), program.Sent("reader")]
    end.meta["roles"] = roles
    handed: list[tuple[int, list[bool]]] = []
    run = render(graph).load("<taken>")
    results = run([torch.zeros(2)], lambda index, value: handed.append((index, watcher.living(value))))
    assert handed == [(0, [True, True]), (1, [True, False, True])]  # the second gradient was freed when `take` did not keep it
    assert results[:2] == (None, None)
    assert results[2] is results[3]
    assert [torch.is_tensor(value) for value in run([torch.zeros(2)])] == [True] * 4


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.partition("def run(boxed")[2].splitlines()]


def a_graph(**meta: Any) -> fx.Graph:
    """`sin(x)` of a tensor x [2, 3], with metadata on the sine."""
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    x.meta = {"val": torch.zeros(2, 3), "role": program.Parameter("layers.0.attn.wq.weight")}
    node = graph.call_function(aten.sin.default, (x,))
    node.meta = {"val": torch.zeros(2, 3), "calls": ("layers.0",), "source": "model.py:41", "stage": 0, **meta}
    end = graph.output((node,))
    end.meta["roles"] = [program.Gradient("layers.0.attn.wq.weight")]
    return graph


def test_lines_say_shape_role_module_and_source() -> None:
    assert lines_of(render(a_graph()).text) == [
        ", take=lambda index, value: value):",
        "(",
        "layers_0_attn_wq_weight,  # f32[2, 3] parameter layers.0.attn.wq.weight",
        ") = boxed",
        "boxed.clear()",
        "sin_default = _aten_sin_default(layers_0_attn_wq_weight); del layers_0_attn_wq_weight"
        "  # f32[2, 3] in layers.0 (model.py:41)",
        "sin_default = take(0, sin_default)",
        "return (",
        "sin_default,  # gradient of layers.0.attn.wq.weight",
        ")",
    ]


@pytest.mark.parametrize(
    ("target", "spelled"),
    [
        (aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (getattr(aten.random, "from"), "getattr(torch.ops.aten.random, 'from')"),
        (torch.ops.higher_order.cond, "torch.ops.higher_order.cond"),
        (operator.getitem, "operator.getitem"),
        (math.floor, "math.floor"),
        (torch.relu, "torch.relu"),
        (torch.nn.functional.softplus, "torch._C._nn.softplus"),
        (abs, "abs"),
        (shifted, "tests.passes.text.test_render.shifted"),
        (nameless, None),
        (seeded, None),
    ],
)
def test_targets_are_spelled_by_a_name_that_leads_to_them(target: Any, spelled: str | None) -> None:
    assert python_name(target) == (spelled and spelled.replace("tests.passes.text.test_render", __name__))


def test_sub_graphs_in_sub_graphs_are_defined() -> None:
    def make(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.cond(x.max() > 1, inner, torch.cos, (x,)), torch.sin, (x,))

    def inner(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format) * math.inf

    module = torch.fx.experimental.proxy_tensor.make_fx(make, tracing_mode="fake")(torch.ones(2))
    namespace: dict[str, Any] = {"torch": torch}
    exec(define("whole", module), namespace)
    for x in (torch.tensor([2.0, 1.0]), torch.tensor([0.5, 0.2]), torch.tensor([-1.0, 0.5])):
        assert torch.equal(namespace["whole"](x), make(x))


# ----------------------------------------------------------------------------------------------------------- tracebacks
