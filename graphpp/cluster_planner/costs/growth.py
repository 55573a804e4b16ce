"""Find which dimensions of the values of a graph grow, where some dimensions of its inputs grow by the same factor.

Contract
    in   a joint graph; the growing dimensions of placeholders: the batch of the inputs, or the sharded dimension of parameters
    out  `Growth.of[node]`: for each dimension of the node's value the power of the factor (a tuple of these for a tuple of
         tensors); `Growth.collectives[node]`: the exchanges that a sharded value needs at a node (`sharded=True`)
    Raises `CaptureError` at an operation for which the growth of the operands does not fit. The graph is not changed.

Each operator runs once on fake tensors whose growing dimensions are twice as large, so torch itself says what the result is;
equal calls run once. Sizes that a graph has as plain numbers (`view`, `expand`, `zeros`) follow from the operands, from the
forward operation of which the node is the backward, or, where neither says, from the first operation that would not run
otherwise.

Sharded values: a growing dimension is one that ranks divide among them. Where it vanishes (a contraction, a sum) each rank has
a part of the sum: an all-reduce. An operand that is whole is cut where the other operand is sharded, without an exchange. Where
an operator needs a dimension as a whole, and where the plan says so, a value is gathered.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot
from graphpp.cluster_planner.costs.fake_calls import (
    Dims,
    Exponents,
    called,
    grows,
    has_tensor,
    keyed,
    log_of,
    name_of,
    nothing_of,
    powers_of,
    quiet,
    shape_of,
    sizes_of,
    twice,
)  # fmt: skip
from graphpp.cluster_planner.costs.sizes import FREE_SIZES, VIEWS, moved, regrouped, scaled_call
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.passes.graph.op_costs import flops_of

NOTHING: Mapping[fx.Node, Dims] = {}
_FAR = 80  # operations between a size that is a plain number, and the operation that tells how it grows
_SELECTING = ("select", "slice", "index", "gather", "zeros_like", "ones_like", "full_like", "empty_like", "argmax", "topk")
_WRITING = ("index_copy", "index_put", "_unsafe_index_put", "index_add", "scatter", "scatter_add", "scatter_reduce")
_SHARED_ROWS = ("_softmax", "_log_softmax")  # of a sharded dimension: ranks exchange the maximum and the sum of each row


class Growth:
    """The growth of all values. `flops[node]`: the FLOPs at the sizes of the graph, and the power of the factor.

    `known`: the growth of some values, from elsewhere. `doubtful`: forward operations that write growing values into a value
    whose size is a plain number (slots of experts, say): the graph does not tell whether the number depends on the batch.
    """

    def __init__(
        self,
        joint: JointGraph,
        inputs: Mapping[fx.Node, Dims],
        *,
        sharded: bool = False,
        gathered: Iterable[fx.Node] = (),
        known: Mapping[fx.Node, Dims] = NOTHING,
    ) -> None:
        self.of: dict[fx.Node, Exponents] = {}
        self.flops: dict[fx.Node, tuple[float, int]] = {}
        self.doubtful: list[fx.Node] = []
        self.collectives: dict[fx.Node, list[tuple[str, fx.Node]]] = defaultdict(list)
        self._sharded, self._gathered = sharded, set(gathered)
        self._order = [node for node in joint.graph.nodes if node.op != "output"]
        self._at = {node: index for index, node in enumerate(self._order)}
        self._chosen: dict[fx.Node, Dims] = dict(known)
        self._known: dict[Any, tuple[Exponents, float, int]] = {}
        self._mode = aot.fake_mode()
        self._base = {size for node, dims in inputs.items() for size, power in sizes_of(node.meta["val"], dims) if power}
        self._single = not sharded and 1 in self._base
        self._twins: dict[int, list[fx.Node]] = defaultdict(list)
        self._cut: dict[int, tuple[tuple[int, ...], Dims]] = {}  # autograd number -> whole value, as its backward takes it
        for node in self._order:
            if node.op != "placeholder" and not node.meta["backward"]:
                self._twins[node.meta["seq"]].append(node)
        for node in self._order:
            if node.op == "placeholder":
                self.of[node] = inputs.get(node) or nothing_of(node)
            else:
                self._enter(node)

    # ------------------------------------------------------------------------------------------ one node

    def _enter(self, node: fx.Node) -> None:
        try:
            self.of[node] = self._evaluated(node)
        except _UnfitError as fault:
            if not self._inferred(node) and not self._whole(node):
                raise CaptureError(
                    f"cluster costs: {node.target} at {describe_node(node)} does not fit operands that grow: {fault}. "
                    "Where the example has one row, give one with two rows, whose dimension can be told from others"
                ) from fault

    def _evaluated(self, node: fx.Node, cut: Mapping[fx.Node, Dims] = NOTHING) -> Exponents:
        """The growth of a node's value. `cut`: operands that are taken as if they grew."""
        if node in self._chosen:
            return self._chosen[node]
        grown = {source: cut.get(source) or self._operand(node, source) for source in node.all_input_nodes}
        if node.target is operator.getitem:
            source, index = node.args
            return grown[source][index]  # type: ignore[index]
        if not any(map(grows, grown.values())):
            return nothing_of(node)
        found, flops, power = self._run(node, grown)
        if flops:
            self.flops[node] = (flops, power)
        self._note(node, grown, found)
        if node in self._gathered:
            self.collectives[node].append(("all_gather", node))
            self._cut[node.meta["seq"]] = (shape_of(node.meta["val"]), found)
            return nothing_of(node)
        return found

    def _operand(self, node: fx.Node, source: fx.Node) -> Exponents:
        """The growth of an operand; the backward of a gathered value takes its own part of the gradient."""
        own = self.of[source]
        if self._cut and node.meta["backward"] and not grows(own) and node.meta["seq"] in self._cut:
            shape, dims = self._cut[node.meta["seq"]]
            if isinstance(source.meta["val"], torch.Tensor) and shape_of(source.meta["val"]) == shape:
                return dims
        return own

    def _run(self, node: fx.Node, grown: Mapping[fx.Node, Exponents]) -> tuple[Exponents, float, int]:
        twin = self._twin(node)
        key = (node.target, twin, keyed((node.args, tuple(sorted(node.kwargs.items()))), grown))
        if key not in self._known:
            self._known[key] = self._probed(node, grown, twin)
        found = self._known[key]
        if isinstance(found, _UnfitError):
            raise found
        return found

    def _probed(self, node: fx.Node, grown: Mapping[fx.Node, Exponents], twin: Dims | None) -> Any:
        target, args = called(node)
        name = name_of(node)
        try:
            if name in (*VIEWS, "expand"):
                return self._resized(node, name, grown, twin), 0.0, 0
            if name in FREE_SIZES:
                return (twin if twin is not None else nothing_of(node)), 0.0, 0
            with self._mode, quiet():
                made: dict[fx.Node, Any] = {source: twice(source.meta["val"], grown[source]) for source in grown}
                real, large = scaled_call(name, args, node.kwargs, grown, made, twin)
                result = target(*real, **large)
            found = powers_of(node.meta["val"], result)
            counted, more = flops_of(node), flops_of(node, made, result)
            return found, counted, round(log_of(more / counted)) if counted else 0
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as fault:
            return _UnfitError(f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}")

    def _resized(self, node: fx.Node, name: str, grown: Mapping[fx.Node, Exponents], twin: Dims | None) -> Dims:
        """The growth of a view or an expansion, whose sizes are plain numbers."""
        source = node.all_input_nodes[0]
        before, dims, after = shape_of(source.meta["val"]), grown[source], shape_of(node.meta["val"])
        if name == "expand":
            more = len(after) - len(before)
            own = [0] * more + [power if before[at] == after[at + more] else 0 for at, power in enumerate(dims)]
            guess = twin if twin is not None else (0,) * len(after)
            free = [at < more or before[at - more] != after[at] for at in range(len(after))]
            return tuple(guess[at] if free[at] else power for at, power in enumerate(own))
        if twin is not None and sum(twin) == sum(dims):
            return twin
        return regrouped(before, dims, after, self._single)

    def _twin(self, node: fx.Node) -> Dims | None:
        """The growth of a value of the forward operation that has the shape of this gradient; None: there is none."""
        value = node.meta["val"]
        if not node.meta["backward"] or not isinstance(value, torch.Tensor):
            return None
        shape = shape_of(value)
        for other in self._twins.get(node.meta["seq"], ()):
            for each in (*other.all_input_nodes, other):
                own = each.meta.get("val")
                if isinstance(own, torch.Tensor) and shape_of(own) == shape and grows(self.of[each]):
                    return self.of[each]  # type: ignore[no-any-return]
        return None

    def _note(self, node: fx.Node, grown: Mapping[fx.Node, Exponents], found: Exponents) -> None:
        """The exchange of a sharded value at an operation, if there is one."""
        name = name_of(node)
        if not self._sharded:
            if name in _WRITING and not grows(found) and not node.meta["backward"]:
                self.doubtful.append(node)
            return
        first = found[0] if found and isinstance(found[0], tuple) else found
        lost = first is not None and not any(first) if name == "convolution_backward" else not grows(found)
        if name in _SHARED_ROWS and grown[node.all_input_nodes[0]][node.args[1]]:
            self.collectives[node] += [("rows", node), ("rows", node)]
        elif lost and not name.startswith(_SELECTING) and name not in FREE_SIZES:
            self.collectives[node].append(("all_reduce", node))

    # ------------------------------------------------------------------------------------------ sizes that nothing says yet

    def _inferred(self, node: fx.Node) -> bool:
        """Let a size that is a plain number grow, so that the operation runs; for sharded values, cut a whole operand."""
        sizes = {
            size
            for source in node.all_input_nodes
            for size, power in sizes_of(source.meta["val"], self.of[source])
            if power
        } | self._base
        for free, dims in self._candidates(self._free_before(node), sizes):
            before, self._chosen[free] = self._chosen.get(free), dims
            changed = self._again(free, node)
            if changed is not None:
                self.of.update(changed)
                return True
            if before is None:
                del self._chosen[free]
            else:
                self._chosen[free] = before
        return self._sharded and self._cut_operand(node, sizes)

    def _free_before(self, node: fx.Node) -> list[fx.Node]:
        """The nodes with sizes as plain numbers whose values reach the operation, the farthest first."""
        found, pending, seen = list[fx.Node](), list(node.all_input_nodes), set[fx.Node]()
        while pending and len(seen) < _FAR:
            each = pending.pop(0)
            if each in seen or each.op == "placeholder":
                continue
            seen.add(each)
            name = name_of(each)
            sized = name in FREE_SIZES or name == "expand" or (self._sharded and name in VIEWS)
            if sized or not any(has_tensor(source) for source in each.all_input_nodes):
                found.append(each)
            pending += each.all_input_nodes
        return [each for each in reversed(found) if isinstance(each.meta["val"], torch.Tensor)]

    def _candidates(self, free: Sequence[fx.Node], sizes: set[int]) -> Iterator[tuple[fx.Node, Dims]]:
        for each in free:
            shape, own = shape_of(each.meta["val"]), self.of[each]
            if name_of(each) in VIEWS:
                yield from ((each, dims) for dims in moved(shape, own))
                continue
            at = [index for index, size in enumerate(shape) if size in sizes and not own[index]]
            for count in (1, 2):
                for chosen in combinations(at, count):
                    yield each, tuple(int(index in chosen) or power for index, power in enumerate(own))

    def _again(self, free: fx.Node, last: fx.Node) -> dict[fx.Node, Exponents] | None:
        """The growth of the values between a node and an operation, once the node's is chosen; None: it does not fit."""
        before, changed = dict[fx.Node, Exponents](), set[fx.Node]()
        try:
            for node in self._order[self._at[free] : self._at[last] + 1]:
                if node is free or node is last or any(source in changed for source in node.all_input_nodes):
                    found = self._evaluated(node)
                    if node is last or found != self.of[node]:
                        before[node] = self.of.get(node)
                        self.of[node] = found
                        changed.add(node)
        except _UnfitError:
            for node, own in before.items():
                self.of[node] = own
            return None
        return {node: self.of[node] for node in before}

    def _cut_operand(self, node: fx.Node, sizes: set[int]) -> bool:
        """Take the rank's part of a whole operand."""
        for source in node.all_input_nodes:
            if not isinstance(source.meta["val"], torch.Tensor) or grows(self.of[source]):
                continue
            shape = shape_of(source.meta["val"])
            for at in (index for index, size in enumerate(shape) if size in sizes):
                try:
                    self.of[node] = self._evaluated(node, {source: tuple(int(index == at) for index in range(len(shape)))})
                    return True
                except _UnfitError:
                    continue
        return False

    def _whole(self, node: fx.Node) -> bool:
        """Gather the sharded operands of an operation that needs whole ones."""
        if not self._sharded:
            return False
        sources = [source for source in node.all_input_nodes if grows(self.of[source])]
        self.collectives[node] += [("all_gather", source) for source in sources]
        self.of[node] = nothing_of(node)
        return True


class _UnfitError(Exception):
    """Operands do not fit each other."""
