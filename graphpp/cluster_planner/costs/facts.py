"""Note on each node of a joint graph how its value grows with rows, shrinks with ranks, and which exchanges it takes part in.

Contract
    in   a joint graph whose nodes have stages; the number of rows; the sharded parameters
    out  `meta["rows"]`, `meta["sharded"]`: the growth of the value (`growth.py`); `meta["experts"]`: 1 where the value is of
         the parameters of experts alone, or their gradient; `meta["work"]`: FLOPs as a term of `operations.py`;
         `meta["exchanges"]`: (kind, size) of each exchange. Nodes of stages copy them
    Raises `CaptureError` where the growth cannot be found.

Experts: each rank has some of them, and as many tokens as it gives away arrive. So the tokens that a group of experts computes
on are exchanged twice in the forward and twice in the backward, and only parameters become fewer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import fx

from graphpp._torch.symbols import hint
from graphpp.cluster_planner.costs.fake_calls import name_of, nothing_of, powers_of
from graphpp.cluster_planner.costs.growth import Growth
from graphpp.cluster_planner.costs.operations import ATTENTION, ATTENTION_BACKWARD, packet_of, size_of
from graphpp.cluster_planner.costs.sizes import FREE_SIZES, VIEWS
from graphpp.cluster_planner.costs.tensor_plan import ShardedParameters
from graphpp.errors import CaptureError
from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.passes.graph.op_costs import flops
from graphpp.runtime import program

Second = Callable[[], JointGraph]
"""The graph of the same model for twice as many rows, whose nodes have stages."""


def note_facts(
    joint: JointGraph, rows: int, sharded: ShardedParameters, *, merged: bool = True, second: Second | None = None
) -> None:
    """Write the facts into the metas of all nodes, in place.

    `merged`: gradients that are only added are reduced once, as their sum; torch's `parallelize_module` reduces each by itself.
    `second`: called where the graph alone does not tell how sizes depend on rows.
    """
    inputs = joint.inputs()
    batch = {node: (1, *[0] * (node.meta["val"].dim() - 1)) for role, node in inputs.items() if _is_batch(role, node, rows)}
    if not batch:
        raise CaptureError(f"cluster costs: no tensor of the example that the model reads has {rows} rows as first dimension")
    parameters = {role.fqn: node for role, node in inputs.items() if isinstance(role, program.Parameter)}
    cut = {parameters[fqn]: _one(node_dims(parameters[fqn]), dim) for fqn, dim in sharded.dims.items() if fqn in parameters}
    gathered = _products_of(joint, {parameters[fqn] for fqn in sharded.gathered if fqn in parameters})
    by_rows = _growth_with_rows(joint, batch, second)
    by_ranks = Growth(joint, cut, sharded=True, gathered=gathered) if cut else None
    for node in joint.graph.nodes:
        if node.op != "output":
            node.meta["rows"] = by_rows.of[node]
            node.meta["sharded"] = by_ranks.of[node] if by_ranks else nothing_of(node)
            node.meta["experts"] = 0
            work = by_rows.flops.get(node) or (flops(node), 0)
            if work[0]:
                shared = by_ranks.flops.get(node, (0.0, 0))[1] if by_ranks else 0
                node.meta["work"] = (work[1], shared, 0, work[0])
    exchanges: dict[fx.Node, list[tuple[str, fx.Node]]] = defaultdict(list)
    exchanges.update(by_ranks.collectives if by_ranks else {})
    if merged:
        _merge_sums(joint, exchanges)
    _note_experts(joint, {parameters[fqn]: group for fqn, group in sharded.experts.items() if fqn in parameters}, exchanges)
    for node, found in exchanges.items():
        node.meta["exchanges"] = tuple(_exchange(kind, each) for kind, each in found)
    _note_context(joint)


def _growth_with_rows(joint: JointGraph, batch: Mapping[fx.Node, tuple[int, ...]], second: Second | None) -> Growth:
    """How values grow with rows; a second graph is asked where the first one does not tell, or tells two things."""
    try:
        found = Growth(joint, batch)
    except CaptureError:
        if second is None:
            raise
        return Growth(joint, batch, known=_compared(joint, second, next(joint.computed())))
    return Growth(joint, batch, known=_compared(joint, second, found.doubtful[0])) if found.doubtful else found


def _compared(joint: JointGraph, second: Second | None, doubtful: fx.Node) -> dict[fx.Node, tuple[int, ...]]:
    """The growth of values that are made of plain numbers, from a second graph for twice as many rows."""
    place = f"cluster costs: the size of the values that {doubtful.target} at {describe_node(doubtful)} writes"
    if second is None:
        raise CaptureError(f"{place} is a number that may depend on the rows: give second=, for twice as many rows")
    own, others = list(joint.graph.nodes), list(second().graph.nodes)
    pairs = list(zip(own, others, strict=False))
    alike = len(own) == len(others) and all(one.target == other.target for one, other in pairs if one.op == "call_function")
    if not alike:
        raise CaptureError(f"{place} depends on the rows, and so do the operations: take an example with more rows")
    numbers = (*FREE_SIZES, *VIEWS, "expand")
    made = [(one, other) for one, other in pairs if one.op == "call_function" and name_of(one) in numbers]
    tensors = [(one, other) for one, other in made if isinstance(one.meta["val"], torch.Tensor)]
    return {one: powers_of(one.meta["val"], other.meta["val"]) for one, other in tensors}


def node_dims(node: fx.Node) -> int:
    """The number of dimensions of a node's value."""
    return int(node.meta["val"].dim())


def _is_batch(role: object, node: fx.Node, rows: int) -> bool:
    value = node.meta["val"]
    return isinstance(role, program.Input) and value.dim() > 0 and hint(value.shape[0]) == rows


def _one(rank: int, dim: int) -> tuple[int, ...]:
    return tuple(int(at == dim) for at in range(rank))


def _products_of(joint: JointGraph, parameters: set[fx.Node]) -> set[fx.Node]:
    """The forward operations that read these parameters, or values of them alone, and something else."""
    own, found = set(parameters), set[fx.Node]()
    for node in joint.computed():
        if not node.meta["backward"] and own.intersection(node.all_input_nodes):
            if set(node.all_input_nodes) <= own:
                own.add(node)
            else:
                found.add(node)
    return found


def _exchange(kind: str, node: fx.Node) -> tuple[str, tuple[tuple[int, int, int, float], ...]]:
    """An exchange of the whole value of a node; "rows": one number for each row of it."""
    size = tuple((rows, 0, 0, amount) for rows, _, _, amount in size_of(node))
    if kind == "rows":
        last = hint(node.meta["val"].shape[-1])
        return "all_reduce", tuple((*powers, amount / last) for *powers, amount in size)
    return kind, size


def _merge_sums(joint: JointGraph, exchanges: dict[fx.Node, list[tuple[str, fx.Node]]]) -> None:
    """Move the all-reduces of two gradients to the sum of both, where nothing else reads them."""
    for node in joint.computed():
        if node.target is torch.ops.aten.add.Tensor and node.meta["backward"] and len(node.all_input_nodes) == 2:
            parts = [_reduced_alone(source, exchanges) for source in node.all_input_nodes]
            if all(part is not None for part in parts):
                for part in parts:
                    exchanges.pop(part)  # type: ignore[arg-type]
                exchanges[node].append(("all_reduce", node))


def _reduced_alone(node: fx.Node, exchanges: Mapping[fx.Node, list[tuple[str, fx.Node]]]) -> fx.Node | None:
    """The all-reduced operation of which a value is a view, if one operation alone reads each of them."""
    while len(node.users) == 1:
        kinds = [kind for kind, _ in exchanges.get(node, ())]
        if kinds or not shares_memory(node):
            return node if kinds == ["all_reduce"] else None
        node = node.all_input_nodes[0]
    return None


# ------------------------------------------------------------------------------------------------- experts


def _note_experts(
    joint: JointGraph, groups: Mapping[fx.Node, str], exchanges: dict[fx.Node, list[tuple[str, fx.Node]]]
) -> None:
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


def _note_gradient(node: fx.Node) -> None:
    """The gradient of an expert's parameter, and the values from which it is made by views and casts."""
    elements = prod(map(hint, node.meta["val"].shape))
    while node.op == "call_function" and prod(map(hint, node.meta["val"].shape)) == elements:
        node.meta["experts"] = 1
        source = next(iter(node.all_input_nodes), None)
        if node.meta.get("work") or source is None or not isinstance(source.meta["val"], torch.Tensor):
            return
        node = source


# ------------------------------------------------------------------------------------------------- context


def _note_context(joint: JointGraph) -> None:
    """Keys and values are gathered before an attention; in its backward once more, and their gradients are reduced."""
    for node in joint.computed():
        packet = packet_of(node)
        if packet in ATTENTION or packet in ATTENTION_BACKWARD:
            args = [each for each in node.args if isinstance(each, fx.Node) and each.meta.get("rows")]
            key, value = args[1:3] if packet in ATTENTION else args[2:4]
            sizes = tuple(term for each in (key, value) for term in size_of(each))
            times = 1 if packet in ATTENTION else 2
            node.meta["exchanges"] = (*node.meta.get("exchanges", ()), *[("context", sizes)] * times)
