"""Leave three of each run of equal stages: what a pass finds for one of them, it would find for all of the run.

Contract
    in   a joint graph whose nodes have stages and facts (`facts.py`); `group_of`: groups of nodes that a later pass knows, such
         as the regions of recomputation
    out  `Shortened`: a joint graph of its own with the first two and the last stage of each run, and which stages and which
         parameters each of its stages stands for. The whole graph is not changed

A stage owns its nodes, and the placeholders and values without a stage that only it reads. Neighbouring stages are equal where
their nodes are, one by one: the operations, the facts in the metas, the operands, and the readers with the operand at which
each reads. Of a node of another stage, it counts how many stages away the node is and where in its stage it stands, or, unless
the two stages are neighbours, which node it is. So a stage of a run reads and is read by its neighbours, each of them in the
same way, and beyond those by nodes outside of the run, which all stages of the run read alike. In the shortened graph the
third stage stands where the fourth one and so on stood.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import fx

from graphpp._torch import aot
from graphpp.cluster_planner.costs.fake_calls import facts_of_value
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime import program
from graphpp.runtime.randomness import seeded

GroupOf = Callable[[fx.Node], Hashable | None]

_LEFT = 3  # stages of a run
_FACTS = ("backward", "rows", "sharded", "experts", "work", "exchanges", "kept", "step_invariant", "constant", "recomputed")
_OWNED = program.Parameter | program.Buffer
_OF_OWNED = program.Gradient | program.BufferUpdate


@dataclass(frozen=True)
class Shortened:
    """`joint`: the shortened graph, of `len(stages)` stages. `stages`: the stages of the whole graph for which each one stands.

    `_names`: by FQN of a parameter or buffer that one stage of a run owns, those of the other stages for which it stands.
    """

    joint: JointGraph
    stages: tuple[tuple[int, ...], ...]
    _names: Mapping[str, tuple[str, ...]]

    @property
    def stage_of(self) -> tuple[int, ...]:
        """For each stage of the whole graph, the one that stands for it."""
        found = {whole: own for own, stages in enumerate(self.stages) for whole in stages}
        return tuple(found[whole] for whole in range(len(found)))

    def whole(self, fqn: str, stages: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Of a parameter or buffer that these stages read: the stages of the whole graph, by FQN; for its equals as well."""
        each = [self.stages[stage] for stage in stages]
        if fqn not in self._names:
            return {fqn: tuple(sorted(whole for found in each for whole in found))}
        return {name: tuple(found[at] for found in each) for at, name in enumerate((fqn, *self._names[fqn]))}


def shortened(joint: JointGraph, stages: int, group_of: Sequence[GroupOf] = ()) -> Shortened:
    """Leave three stages of each run of equal ones."""
    owned = _Owned(joint, stages, group_of)
    kept, stand_ins = _kept([owned.signature(stage) for stage in range(stages)])
    if len(kept) == stages:
        return Shortened(joint, tuple((stage,) for stage in range(stages)), {})
    names = _names(owned, kept, stand_ins)
    return Shortened(_without(joint, owned, kept, stand_ins), tuple(stand_ins[stage] for stage in kept), names)


def _kept(signatures: Sequence[Hashable]) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The stages that stay, and the stages for which each stands, itself first."""
    kept, stand_ins = list[int](), dict[int, tuple[int, ...]]()
    for _, group in groupby(range(len(signatures)), key=signatures.__getitem__):
        run = list(group)
        gone = run[2:-1] if len(run) > _LEFT else []
        for stage in run:
            if stage not in gone:
                kept.append(stage)
                stand_ins[stage] = (stage, *gone) if gone and stage == run[1] else (stage,)
    return kept, stand_ins


class _Owned:
    """The nodes of each stage in the order of the graph."""

    def __init__(self, joint: JointGraph, stages: int, group_of: Sequence[GroupOf]) -> None:
        self.owner = _owners(joint)
        self.nodes: list[list[fx.Node]] = [[] for _ in range(stages)]
        self.place: dict[fx.Node, int] = {}
        for node in joint.graph.nodes:
            stage = self.owner[node]
            if stage is not None:
                self.place[node] = len(self.nodes[stage])
                self.nodes[stage].append(node)
        self._groups = [_group_places(joint, each, self.owner, self.place) for each in (_sequence, _checkpoint, *group_of)]
        self._results: dict[fx.Node, list[Hashable]] = defaultdict(list)
        read = {(type(role), role.fqn): node for role, node in joint.inputs().items() if isinstance(role, _OWNED)}
        for role, node in joint.outputs():
            kind = program.Parameter if isinstance(role, program.Gradient) else program.Buffer
            target = read.get((kind, role.fqn)) if isinstance(role, _OF_OWNED) else None
            found = role if target is None else (type(role), self._reference(target, self.owner[node]))
            self._results[node].append(found)

    def signature(self, stage: int) -> Hashable:
        """All facts of a stage's nodes; equal stages have equal ones."""
        return tuple(self._facts(node, stage) for node in self.nodes[stage])

    def _facts(self, node: fx.Node, stage: int) -> Hashable:
        args = (node.args[0], *node.args[2:]) if node.target is seeded else node.args  # without the operator's number
        target = type(node.meta["role"]) if node.op == "placeholder" else node.target
        others = (user for user in node.users if user.op != "output" and self.owner[user] != stage)
        readers = frozenset((self._reference(user, stage), user.all_input_nodes.index(node)) for user in others)
        value = node.meta.get("val")
        return (
            node.op, target, self._argument(args, stage), self._argument(node.kwargs, stage), facts_of_value(value),
            getattr(value, "requires_grad", None), node.meta.get("stage") is None,
            tuple(_hashable(node.meta.get(each)) for each in _FACTS),
            tuple(group.get(node) for group in self._groups), readers, tuple(self._results.get(node, ())),
        )  # fmt: skip

    def _argument(self, given: Any, stage: int) -> Hashable:
        if isinstance(given, fx.Node):
            return self._reference(given, stage)
        if isinstance(given, dict):
            return tuple((name, self._argument(each, stage)) for name, each in sorted(given.items()))
        if isinstance(given, tuple | list):
            return tuple(self._argument(each, stage) for each in given)
        return type(given), _hashable(given)

    def _reference(self, node: fx.Node, stage: int | None) -> tuple[Any, ...]:
        """A node as seen from a stage."""
        own = self.owner[node]
        if own is None or stage is None or abs(own - stage) > 1:
            return (node.name,)
        return own - stage, self.place[node]


def _hashable(given: Any) -> Hashable:
    return given if given.__hash__ is not None and not isinstance(given, slice) else repr(given)


def _owners(joint: JointGraph) -> dict[fx.Node, int | None]:
    """The stage of each node; of one without a stage the only stage that reads it, None if several do, or if it is a result."""
    owner: dict[fx.Node, int | None] = {}
    shared = {node for _, node in joint.outputs()}
    inputs = joint.inputs()
    for role, node in joint.outputs():  # a result without a stage comes from the first stage that reads its parameter
        if node.meta.get("stage") is None and isinstance(role, _OF_OWNED):
            shared.update(each for own, each in inputs.items() if isinstance(own, _OWNED) and own.fqn == role.fqn)
    for node in reversed(joint.graph.nodes):
        stage = node.meta.get("stage")
        if stage is None and node.op != "output" and node not in shared:
            readers = {owner[user] for user in node.users}
            stage = readers.pop() if len(readers) == 1 else None
        owner[node] = stage
    return owner


def _sequence(node: fx.Node) -> Hashable | None:
    return node.meta.get("seq")


def _checkpoint(node: fx.Node) -> Hashable | None:
    return node.meta.get("checkpoint")


def _group_places(
    joint: JointGraph, group_of: GroupOf, owner: Mapping[fx.Node, int | None], place: Mapping[fx.Node, int]
) -> dict[fx.Node, Hashable]:
    """For each node in a group, which group it is: of one within a stage the place of its first node, of others its name."""
    members = defaultdict[Hashable, list[fx.Node]](list)
    for node in joint.computed():
        group = group_of(node)
        if group is not None:
            members[group].append(node)
    found: dict[fx.Node, Hashable] = {}
    for group, nodes in members.items():
        within = owner[nodes[0]] is not None and len({owner[node] for node in nodes}) == 1
        found.update(dict.fromkeys(nodes, place[nodes[0]] if within else repr(group)))
    return found


# ------------------------------------------------------------------------------------------ the shortened graph


def _names(owned: _Owned, kept: Sequence[int], stand_ins: Mapping[int, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for stage in kept:
        for at, node in enumerate(owned.nodes[stage]):
            if isinstance(node.meta.get("role"), _OWNED) and len(stand_ins[stage]) > 1:
                others = (owned.nodes[other][at] for other in stand_ins[stage][1:])
                found[node.meta["role"].fqn] = tuple(other.meta["role"].fqn for other in others)
    return found


def _without(joint: JointGraph, owned: _Owned, kept: Sequence[int], stand_ins: Mapping[int, tuple[int, ...]]) -> JointGraph:
    """The graph of the stages that stay: the neighbours of a gap read each other."""
    number = {stage: at for at, stage in enumerate(kept)}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    below = {stages[-1]: stage for stage, stages in stand_ins.items()}  # the last stage of a gap -> the one that stands for it
    above = {stages[1]: stages[-1] + 1 for stages in stand_ins.values() if len(stages) > 1}  # its first one -> the one behind

    def source(reader: int | None) -> Callable[[fx.Node], fx.Node]:
        def found(node: fx.Node) -> fx.Node:
            stage = owned.owner[node]
            if stage is None or stage in number:
                return copies[node]
            assert reader is not None, f"{node} of a stage that is left out is read by a value without a stage"
            near = (below if stage < reader else above)[stage]
            return copies[owned.nodes[near][owned.place[node]]]

        return found

    for node in joint.graph.nodes:
        stage = owned.owner[node]
        if node.op != "output" and (stage is None or stage in number):
            copies[node] = graph.node_copy(node, source(stage))
            if node.meta.get("stage") is not None:
                copies[node].meta["stage"] = number[node.meta["stage"]]
    results = [(role, copies[node]) for role, node in joint.outputs() if node in copies]
    end = graph.output(tuple(node for _, node in results))
    end.meta = {**joint.graph.output_node().meta, "roles": [role for role, _ in results]}
    return replace(joint, module=aot.graph_module(joint.module, graph))
