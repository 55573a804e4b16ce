"""The joint graph: forward, loss and backward of one microbatch as one FX graph whose inputs and results have roles.

Contract:
- Every placeholder has `meta["role"]`, an `InputRole`; the output node has `meta["roles"]`, one `OutputRole` per result; no
  pass relies on positions. A parameter, buffer or input is one placeholder, even with several names in the model.
- Every node has `meta["val"]` (a fake tensor or a tuple of them) and `meta["backward"]` (bool).
- Sizes may be symbolic. A symbolic number that follows from the sizes of the inputs is a placeholder with the role `Size`. A
  number that depends on the data is the value of a node (see `capture/sizes/decided_by_data.py`).
- Nodes that compute also have `meta["position"]` (their number in the forward, kept by all passes; -1 in the backward),
  `meta["calls"]` (the surrounding module calls, outermost first, `fqn` or `fqn@k` for the k+1st call), `meta["source"]` (the
  user's `file:line`) and `meta["seq"]` (the autograd sequence number, equal for a forward operation and its backward twin).
- Only forward nodes inside `torch.utils.checkpoint` have `meta["checkpoint"]`, the number of the outermost checkpointed call,
  and `meta["kept"]`: whether the policy of that call saves the node's value.
- `assign_stages` adds `meta["stage"]`; recomputed copies have `meta["recomputed"]`, hoisted values `meta["step_invariant"]`.
- The graph is functional: no node writes into the value of another node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphpp._torch import aot
from graphpp._torch.numbers_of_data import known
from graphpp._torch.symbols import Symbols
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, OutputRole, TensorMeta


@dataclass
class JointGraph:
    """One captured graph. `parameters` and `buffers` have all FQNs of the model, used or not, in the model's order.

    A frozen parameter that the forward writes in place counts as a buffer. `symbols`: the facts under which a graph with
    symbolic sizes is valid. `partial`: by FQN, the group whose ranks compute parts of the gradient.
    """

    module: fx.GraphModule
    training: bool
    parameters: dict[str, TensorMeta]
    buffers: dict[str, TensorMeta]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    symbols: Symbols | None = None
    partial: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def inputs(self) -> dict[InputRole, fx.Node]:
        return {node.meta["role"]: node for node in self.graph.find_nodes(op="placeholder")}

    def outputs(self) -> list[tuple[OutputRole, fx.Node]]:
        """The results with their roles, in order; a gradient has one result for each stage that contributes to it."""
        return results_of(self.graph)

    def set_outputs(self, outputs: Sequence[tuple[OutputRole, fx.Node]]) -> None:
        end = self.graph.output_node()
        end.meta["roles"] = [role for role, _ in outputs]
        end.args = (tuple(node for _, node in outputs),)

    def written(self) -> list[str]:
        """The FQNs of the buffers and frozen parameters that the forward writes."""
        return [role.fqn for role, _ in self.outputs() if isinstance(role, program.BufferUpdate)]

    def copy(self) -> JointGraph:
        module = aot.graph_module(self.module, copied(self.graph))
        return replace(self, module=module, constants=dict(self.constants), partial=dict(self.partial))

    def computed(self) -> Iterator[fx.Node]:
        """The nodes that compute, in order: all except placeholders and the output."""
        return (node for node in self.graph.nodes if node.op not in ("placeholder", "output"))


def copied(source: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    end = graph.output(graph.graph_copy(source, {}))
    end.meta = dict(source.output_node().meta)
    return graph


def results_of(graph: fx.Graph) -> list[tuple[OutputRole, fx.Node]]:
    end = graph.output_node()
    return list(zip(end.meta["roles"], end.args[0], strict=True))  # type: ignore[arg-type]


def reached(start: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes of `start`, and all nodes that `onward` leads to from them, directly or in several steps."""
    seen, pending = set[fx.Node](), list(start)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += onward(node)
    return seen


def is_of_torch(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") in ("aten", "prims")


def remove_unused(graph: fx.Graph) -> None:
    """Erase nodes without readers, including assertions about metadata.

    Checks stay, because they may raise; collectives and waits stay, because the other ranks of the group take part in them.
    """
    for node in reversed(list(graph.nodes)):
        stays = node.op in ("placeholder", "output") or is_check(node) or is_collective(node) or is_wait(node)
        if not node.users and not stays:
            graph.erase_node(node)


def is_check(node: fx.Node) -> bool:
    """Whether a node has no result and raises on failure, as `torch.linalg` does for a singular matrix."""
    return node.target in (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_scalar.default)


def tensor_meta(node: fx.Node, name: str | None = None) -> TensorMeta:
    """Shape, strides and dtype of a node's value, under the node's name; a data-dependent size counts with its maximum."""
    value = node.meta["val"]
    shape, stride = tuple(map(known, value.shape)), tuple(map(known, value.stride()))
    return TensorMeta(name or node.name, shape, stride, value.dtype, value.requires_grad)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def describe_node(node: fx.Node) -> str:
    """The module call and source line of a value, for errors and dumps: `layers.3.attn (model.py:41)`."""
    calls = node.meta.get("calls") or ("",)
    source = node.meta.get("source", "")
    return f"{calls[-1] or 'model'} ({source})" if source else calls[-1] or "model"


def verify_joint_graph(joint: JointGraph) -> None:
    """Check the contract at the head of this file. An `AssertionError` means that the last pass has a bug."""
    joint.graph.lint()
    for node in joint.computed():
        missing = {"val", "backward", "position", "calls", "source", "seq"} - set(node.meta)
        assert not missing, f"{node.format_node()}: no {missing}"
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, f"{node.format_node()} writes into its input"
    assert len(joint.inputs()) == len(joint.graph.find_nodes(op="placeholder")), "a role stands on two placeholders"
    for role, node in joint.outputs():
        assert isinstance(node, fx.Node), f"{role} has no value"
        assert isinstance(role, program.OutputRole), role
