"""Annotate each node of a joint graph: how its value scales with rows and ranks, and which exchanges it takes part in.

Metas: `rows`, `sharded`: powers of the value's dimensions (`dims.py`); `experts`: 1 if the value is computed from expert
parameters alone, or is their gradient; `work`: FLOPs as a term of `operations.py`; `exchanges`: (kind, size, when) of each
exchange (`Operation.when`).
Each rank has some of the experts, and receives as many tokens as it sends. So the tokens of a group of experts are exchanged
twice in the forward and twice in the backward, and expert parallelism divides only parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import fx

from graphpp._torch.symbols import hint
from graphpp.cluster_planner.costs.dims import called, grows, power_of, powers_of
from graphpp.cluster_planner.costs.operations import ATTENTION, ATTENTION_BACKWARD, packet_of, size_of
from graphpp.cluster_planner.costs.sharding import Sharding
from graphpp.cluster_planner.costs.tensor_plan import ShardedParameters
from graphpp.errors import CaptureError
from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.passes.graph.op_costs import flops
from graphpp.runtime import program

_UNLIKE = "cluster costs: with twice as many rows, the model runs other operations"
_ALL_ROWS = (
    "compute all rows at once there, without a loop over them, or plan the modules behind it from their own inputs "
    "(inputs_embeds= in place of images)"
)
Exchanges = dict[fx.Node, list[tuple[str, fx.Node]]]


def note_facts(joint: JointGraph, larger: JointGraph, sharded: ShardedParameters, *, merged: bool = True) -> None:
    """Annotate all nodes in place, from the graphs for some rows and for twice as many. `merged`: gradients that are only added
    are reduced once, as their sum; torch's `parallelize_module` reduces each separately. Raises `CaptureError` if the two
    graphs have different operations, or if no value grows with the rows."""
    parameters = {role.fqn: node for role, node in joint.inputs().items() if isinstance(role, program.Parameter)}
    cut = {parameters[fqn]: dim for fqn, dim in sharded.dims.items() if fqn in parameters}
    dims = {node: tuple(int(at == dim) for at in range(node.meta["val"].dim())) for node, dim in cut.items()}
    gathered = _products_of(joint, {parameters[fqn] for fqn in sharded.gathered if fqn in parameters})
    pairs = tuple(_pairs(joint, larger))
    for node, other in pairs:
        node.meta["rows"] = powers_of(node.meta["val"], other.meta["val"])
    sharding = Sharding(joint, dims, gathered)
    for node, other in pairs:
        node.meta |= {"sharded": sharding.of[node], "experts": 0}
        if work := flops(node):
            node.meta["work"] = (power_of(work, flops(other)), sharding.flops.get(node, 0), 0, work)
    if not any(isinstance(role, program.Input) and grows(node.meta["rows"]) for role, node in joint.inputs().items()):
        raise CaptureError("cluster costs: the model reads no tensor of the example whose first dimension are the rows")
    experts = {parameters[fqn]: group for fqn, group in sharded.experts.items() if fqn in parameters}
    others = {node: each for node, each in dims.items() if node not in experts}
    both = [sharding.exchanges, (sharding if len(others) == len(dims) else Sharding(joint, others, gathered)).exchanges]
    for exchanges in both:
        if merged:
            _merge_sums(joint, exchanges)
    to_experts = _note_experts(joint, experts)
    for node in joint.computed():
        shared, folded = (Counter(each.get(node, ())) for each in both)
        parts = ("", shared & folded), ("shared", shared - folded), ("folded", folded - shared), ("", Counter(to_experts[node]))
        found = [(*_exchange(*each), when) for when, several in parts for each in several.elements()]
        if found:
            node.meta["exchanges"] = tuple(found)
    _note_context(joint)


def _pairs(joint: JointGraph, larger: JointGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    nodes, others = ([node for node in each.graph.nodes if node.op != "output"] for each in (joint, larger))
    for node, other in zip(nodes, others, strict=False):
        if node.op != other.op or (node.op == "call_function" and called(node)[0] != called(other)[0]):
            raise CaptureError(f"{_UNLIKE}, {describe_node(other)} for {describe_node(node)}: {_ALL_ROWS}")
    if len(nodes) != len(others):
        raise CaptureError(f"{_UNLIKE}, {len(others)} instead of {len(nodes)}: {_ALL_ROWS}")
    return zip(nodes, others, strict=True)


def _products_of(joint: JointGraph, parameters: set[fx.Node]) -> set[fx.Node]:
    """The forward operations that read these parameters, or values of them alone, and another value."""
    own, found = set(parameters), set[fx.Node]()
    for node in joint.computed():
        if not node.meta["backward"] and own.intersection(node.all_input_nodes):
            if set(node.all_input_nodes) <= own:
                own.add(node)
            else:
                found.add(node)
    return found


def _exchange(kind: str, node: fx.Node) -> tuple[str, tuple[tuple[int, int, int, float], ...]]:
    """An exchange of a node's whole value; "rows" exchanges one number for each row."""
    size = tuple((rows, 0, 0, amount) for rows, _, _, amount in size_of(node))
    if kind == "rows":
        last = hint(node.meta["val"].shape[-1])
        return "all_reduce", tuple((*powers, amount / last) for *powers, amount in size)
    return kind, size


def _merge_sums(joint: JointGraph, exchanges: Exchanges) -> None:
    """Move the all-reduces of two gradients to their sum if nothing else reads them."""
    for node in joint.computed():
        if node.target is torch.ops.aten.add.Tensor and node.meta["backward"] and len(node.all_input_nodes) == 2:
            parts = [_reduced_alone(source, exchanges) for source in node.all_input_nodes]
            if all(part is not None for part in parts):
                for part in parts:
                    exchanges.pop(part)  # type: ignore[arg-type]
                exchanges[node].append(("all_reduce", node))


def _reduced_alone(node: fx.Node, exchanges: Exchanges) -> fx.Node | None:
    """The all-reduced operation behind a chain of views, if each value in the chain has one reader."""
    while len(node.users) == 1:
        kinds = [kind for kind, _ in exchanges.get(node, ())]
        if kinds or not shares_memory(node):
            return node if kinds == ["all_reduce"] else None
        node = node.all_input_nodes[0]
    return None


# ------------------------------------------------------------------------------------------------- experts


def _note_experts(joint: JointGraph, groups: Mapping[fx.Node, str]) -> Exchanges:
    """Annotate values of experts; returns the exchanges of their tokens."""
    exchanges: Exchanges = defaultdict(list)
    own = dict(groups)
    for node in joint.computed():
        sources = node.all_input_nodes
        if sources and all(source in own for source in sources):
            own[node] = own[sources[0]]
    for node in own:
        node.meta["experts"] = 1
    for role, node in joint.outputs():
        if isinstance(role, program.Gradient) and role.fqn in {each.meta["role"].fqn for each in groups}:
            _note_gradient(node)
    calls: dict[tuple[str, bool], list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for node in joint.computed():
        read = [own[source] for source in node.all_input_nodes if source in own]
        tokens = [source for source in node.all_input_nodes if source not in own]
        if read and tokens and node.meta.get("work"):
            calls[read[0], node.meta["backward"]].append((node, tokens[0]))
    for products in calls.values():
        (first, tokens_in), (last, _) = products[0], products[-1]
        exchanges[first].append(("all_to_all", tokens_in))
        exchanges[last].append(("all_to_all", last))
    return exchanges


def _note_gradient(node: fx.Node) -> None:
    """Mark the gradient of an expert's parameter, and the values from which views and casts make it."""
    elements = prod(map(hint, node.meta["val"].shape))
    while node.op == "call_function" and prod(map(hint, node.meta["val"].shape)) == elements:
        node.meta["experts"] = 1
        source = next(iter(node.all_input_nodes), None)
        if node.meta.get("work") or source is None or not isinstance(source.meta["val"], torch.Tensor):
            return
        node = source


# ------------------------------------------------------------------------------------------------- context


def _note_context(joint: JointGraph) -> None:
    """An attention gathers keys and values; its backward gathers them a second time and reduces their gradients."""
    for node in joint.computed():
        packet = packet_of(node)
        if packet in ATTENTION or packet in ATTENTION_BACKWARD:
            args = [each for each in node.args if isinstance(each, fx.Node) and each.meta.get("rows")]
            key, value = args[1:3] if packet in ATTENTION else args[2:4]
            sizes = tuple(term for each in (key, value) for term in size_of(each))
            times = 1 if packet in ATTENTION else 2
            node.meta["exchanges"] = (*node.meta.get("exchanges", ()), *[("context", sizes, "")] * times)
