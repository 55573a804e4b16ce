"""Small joint graphs for the tests of single passes: captured, traced from a function, or made by hand.

Contract: `captured(model, x)` is the joint graph of a model and a mean-square loss, as `capture/trace.py` makes it;
`traced(function, ..)` is a forward without parameters; `Hand` builds a graph whose nodes have the stages and phases that the
test gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.joint.assign_stages import assign_stages
from graphpp.passes.joint.clean_up import clean_up
from graphpp.passes.joint.key_dropout_and_random_ops import key_random_ops
from graphpp.passes.joint.snapshot_buffers import snapshot_buffers
from graphpp.runtime import program as p

CPU = torch.device("cpu")


def mean_square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def captured(model: nn.Module, *inputs: Tensor, loss: Callable[[Any, Any], Tensor] | None = mean_square) -> JointGraph:
    """The joint graph of a model; the target is a zero, which the loss may ignore."""
    return capture(model, loss, Microbatch(inputs, {}, torch.zeros(()) if loss else None), CPU).joint


def copied(joint: JointGraph) -> JointGraph:
    """A copy of a joint graph, since passes change a graph in place."""
    return joint.copy()


def assigned(joint: JointGraph, *starts: int) -> JointGraph:
    """A joint graph after all passes up to `assign`."""
    return assign_stages(key_random_ops(snapshot_buffers(clean_up(joint))), (0, *starts))


def starts(joint: JointGraph, *calls: str) -> tuple[int, ...]:
    """The positions in the forward at which module calls begin (`fqn`, or `fqn@k`)."""
    return tuple(min(node.meta["position"] for node in forward(joint) if call in node.meta["calls"]) for call in calls)


def forward(joint: JointGraph) -> list[fx.Node]:
    return [node for node in joint.computed() if not node.meta["backward"]]


def targets(joint: JointGraph) -> list[str]:
    """The operators of a graph, in order."""
    return [str(node.target) for node in joint.computed()]


def traced(function: Callable[..., Any], *inputs: Tensor) -> JointGraph:
    """A function's operators as a forward whose results are outputs."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    for index, node in enumerate(placeholders):
        node.meta |= {"role": p.Input(f"args[{index}]"), "backward": False}
    joint = JointGraph(module, False, {}, {})
    for position, node in enumerate(joint.computed()):
        node.meta |= {"position": position, "calls": (), "source": "", "seq": -1, "backward": False}
    end = module.graph.output_node()
    results = end.args[0] if isinstance(end.args[0], tuple | list) else (end.args[0],)
    joint.set_outputs([(p.Output(index), node) for index, node in enumerate(results)])  # type: ignore[misc]
    return joint


def run(joint: JointGraph, *inputs: Any) -> Sequence[Tensor]:
    """The results of a graph, run node by node, without passes."""
    results: Sequence[Tensor] = fx.Interpreter(joint.module, graph=joint.graph).run(*inputs)
    return results


def same(*values: Any) -> Any:
    """The operation of all nodes in graphs made by hand."""
    return values[0]


class Hand:
    """A joint graph made by hand: every node is a [2, 3] float tensor, or the value given for it."""

    def __init__(self, *parameters: str) -> None:
        self.graph = fx.Graph()
        self.outputs: list[tuple[p.OutputRole, fx.Node]] = []
        metas = {fqn: p.TensorMeta(fqn, (2, 3), (3, 1), torch.float32, True) for fqn in parameters}
        self.parameters = metas

    def input(self, role: p.InputRole, value: Tensor | None = None) -> fx.Node:
        """Add a placeholder."""
        node = self.graph.placeholder(f"in{len(self.graph.nodes)}")
        node.meta = {"role": role, "val": _value(value), "backward": False, "stage": None}
        return node

    def node(self, name: str, slot: str, *sources: fx.Node, value: Tensor | None = None) -> fx.Node:
        """Add a node to a phase, `F0` or `B2`; `F` alone: a forward node without a stage."""
        node = self.graph.create_node("call_function", same, sources, name=name)
        stage = int(slot[1:]) if slot[1:] else None
        node.meta = {
            "val": _value(value), "backward": slot[0] == "B", "stage": stage, "position": len(self.graph.nodes),
            "calls": (), "source": "", "seq": -1,
        }  # fmt: skip
        return node

    def result(self, role: p.OutputRole, node: fx.Node) -> None:
        """Make a node a result."""
        self.outputs.append((role, node))

    def joint(self, training: bool = True) -> JointGraph:
        """The finished graph."""
        self.graph.output(()).meta.update(val=None, backward=False)
        joint = JointGraph(fx.GraphModule(nn.Module(), self.graph), training, self.parameters, {})
        joint.set_outputs(self.outputs)
        return joint


def _value(value: Tensor | None) -> Tensor:
    return torch.empty(2, 3, device="meta") if value is None else value
