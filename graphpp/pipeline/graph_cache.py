"""The graphs and runners that a pipeline has made so far, each made once and on all ranks alike.

Contract
--------
- One compiled graph per signature of a microbatch, mode of the model (flags, dtypes) and autocast, or one for several sizes
  (`varying_sizes.py`); one runner per sequence of graphs that a call's microbatches use.
- At most `max_graphs` graphs are kept, and those of the latest call if it uses more, and the programs of graphs with open
  sizes for the latest `_SIZES * max_graphs` sizes; the one used longest ago goes first, with
  a message that says which argument keeps changing.
- A new call is lowered, agreed on, compiled, agreed on, and gets its runner. If a step fails on one rank it fails on all,
  and a rank keeps only graphs and runners that all ranks keep.
- The first graph decides which rank holds which parameter (`ownership/`); a later one that would read it elsewhere is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from graphpp.backends.record_programs import RecordedPrograms
from graphpp.batch.cut_batch import leading_size
from graphpp.batch.loss_weights import LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.outputs import check_mergeable
from graphpp.capture.trace import CapturedGraph
from graphpp.compiler import facts
from graphpp.compiler.assemble import Assembly
from graphpp.compiler.build import Lowered, check_homes, check_same_results, lowered
from graphpp.compiler.capture_once import capture_graphs
from graphpp.compiler.compile_graph import CompiledGraph, TableFor, compile_graph
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.shared_layers import check_shared_layers
from graphpp.errors import GraphPPError
from graphpp.ownership.ownership import Ownership
from graphpp.parallel.agreement import Agreement
from graphpp.parallel.facts import Facts
from graphpp.pipeline.graph_keys import GraphKeys, Recent, check_same_updates
from graphpp.pipeline.step_call import GraphKey, KeysOfCall, StepCall
from graphpp.pipeline.varying_sizes import VaryingSizes
from graphpp.planner.tables import CheckedTable, ShardPolicy, Tables
from graphpp.runtime.messages.mailbox import message_flow
from graphpp.runtime.model_state import ModelState, tensor_lines
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.table.schedule import Schedule

T = TypeVar("T")
_LOG = logging.getLogger("graphpp")
_SHAPES = "the shapes of the microbatches, which must be equal on ranks along ep and cp, whose models exchange values"
_SIZES = 8  # how many sizes are kept for each graph that may be kept


@dataclass(frozen=True)
class PreparedStep:
    """A call that can run: lowered and compiled, with its runner."""

    lowered: Lowered
    runner: GraphPPRunner

    def inputs(self, parts: Sequence[FlatMicrobatch]) -> list[Mapping[str, torch.Tensor]]:
        """The tensors of each microbatch as the graphs take them: a graph with open sizes takes integers in order of memory."""
        pairs = zip(parts, self.lowered.graphs, strict=True)
        return [(part if graph.general is None else part.with_ordered_integers()).tensors for part, graph in pairs]

    def reads(self) -> set[str]:
        """The paths of the tensors of a microbatch that this rank's stages read."""
        return set().union(*(graph.reads(self.runner.place.rank) for graph in self.lowered.graphs))


class GraphCache:
    """Compiles the graphs and makes the runners that are new, and keeps them."""

    def __init__(self, request: CompileRequest, state: ModelState, agreement: Agreement) -> None:
        """`agreement`: of the ranks that compute the same microbatches."""
        options, place = request.options, request.place
        self._request, self._state = request, state
        self._agreement = agreement if place.tp_group is None else place.agreement(place.group)
        self._columns = None if place.tp_group is None else agreement
        self._modules = dict(request.model.named_modules())
        limit = options.debug.max_graphs
        self._keys = GraphKeys(request.model, request.loss, place.device.type, _SIZES * limit)
        self._facts: Recent[tuple[Any, ...], tuple[Facts, Facts]] = Recent(_SIZES * limit)
        self._graphs: Recent[GraphKey, CompiledGraph] = Recent(limit)
        self._sized: Recent[GraphKey, CompiledGraph] = Recent(_SIZES * limit)
        self._sizes = VaryingSizes(options.debug.dynamic, limit, warns=place.rank == 0)
        self._prepared: Recent[tuple[GraphKey, ...], PreparedStep] = Recent(_SIZES * limit)
        self._assembly = Assembly(request, state)
        self.ownership = Ownership(state, place, options, self.captured, self._keys.forget_values, self._agreement)
        self._shards = ShardPolicy(options.parallel.keep) if place.sharding is not None else None
        self.tables = Tables(options.schedule, place.ranks, self._shards, message_flow(place.group, place.device))
        self.first: CompiledGraph | None = None

    @property
    def recorded(self) -> RecordedPrograms:
        """The CUDA graphs of the runners."""
        return self._assembly.recorded

    def call(self, parts: Sequence[FlatMicrobatch], weighting: LossWeighting, *, training: bool) -> StepCall:
        """A call over these microbatches, with the model as it is now.

        Raises `GraphPPError` where modules or ties of parameters have changed since the pipeline was made, while another thread
        captures the model, and where another pipeline has trained a parameter elsewhere.
        """
        keys = self._keys.keys(training, [part.signature for part in parts])
        if self.first is not None:
            self.ownership.check_copies(self.first)
        if self.ownership.sharded is not None:
            self.ownership.sharded.check(self._state)
        return StepCall(parts, training, KeysOfCall([keys[part.signature] for part in parts]), weighting)

    def recapture(self) -> None:
        """Let every later call be captured anew."""
        self._keys.recapture()

    def after_step(self, call: StepCall, step: PreparedStep) -> None:
        """Change numbers in attributes of the model as the microbatches of a call do in eager, and note the training step."""
        if call.training:
            self.ownership.after_training()
        self._keys.after_step(call, [graph.captured.updates for graph in step.lowered.graphs])

    def facts(self, call: StepCall) -> Facts:
        """The lines about a call that all ranks of a pipeline must have alike before they go on with it."""
        return self._facts_of_call(call)[0]

    def facts_of_peers(self, call: StepCall) -> Facts:
        """The lines about a call that ranks must have alike whose models exchange values, along `ep` and `cp`."""
        return self._facts_of_call(call)[1]

    def _facts_of_call(self, call: StepCall) -> tuple[Facts, Facts]:
        kept = self._kept(call)
        key = kept, call.keys
        if key not in self._facts:
            both = {
                "the call": ["step" if call.training else "eval"],
                "training flags": [f"{fqn}.training={module.training}" for fqn, module in self._modules.items()],
                "autocast": [str(call.keys[0].around[-1])],
                "what it has kept for this call": [kept],
            }
            number = {"the number of microbatches": [str(len(call.parts))], "the microbatch": call.describe()}
            pipeline = Facts({**both, **number, "the model": tensor_lines(self._request.model)})
            self._facts.keep(key, (pipeline, Facts({**both, _SHAPES: call.shapes()})))
        return self._facts.use(key)

    def _kept(self, call: StepCall) -> str:
        """How much of the call is in the cache, in words that ranks compare.

        A rank that compiles a call and a rank that runs it from its cache would wait for each other.
        """
        if call.keys in self._prepared:
            return "a graph and its runner"
        parts = list(call.distinct.items())
        new = [str(at) for at, (key, _) in enumerate(parts) if self._kept_graph(key) is None]
        if not new:
            return "a graph"
        if all(self._kept_graph(key) is not None or self._sizes.serves(key, part) for key, part in parts):
            return "a graph for other sizes"
        if len(new) == len(call.distinct):
            return "nothing yet (such a call is new, or an attribute or hook of the model has changed)"
        return f"no graph for microbatches of shape {', '.join(new)}"

    def captured(self) -> CompiledGraph:
        """The first graph that was captured. Raises `GraphPPError` before anything is captured."""
        if self.first is None:
            raise GraphPPError("nothing is captured yet: give example= to graphpp.compile, or run a step first")
        return self.first

    # ------------------------------------------------------------------------------------ the straight line of a new call

    def compile(self, call: StepCall, microbatches: int) -> None:
        """Compile and keep the graphs of a call, for a table of so many microbatches. Called by all ranks."""
        work = partial(self._compile_graphs, call, microbatches)
        graphs, _ = self._together(work, _facts_of_graphs)
        self._check_columns(graphs)
        self._keep(graphs, call)

    def has(self, call: StepCall) -> bool:
        """Whether the call was prepared before."""
        return call.keys in self._prepared

    def prepared(self, call: StepCall) -> PreparedStep:
        """The call with its runner, from the cache or made now. Called by all ranks.

        A new call takes two rounds of agreement, one when it is lowered and one when it is compiled. Raises on all ranks if it
        raises on one.
        """
        if call.keys not in self._prepared:
            try:
                graphs, made = self._together(partial(self._lower, call), self._facts_of)
                self._check_columns(graphs)
            except Exception:
                self._assembly.keep_only(self._all_kept())  # the regions of a call that was refused
                raise
            self._keep(graphs, call)
            replicas, rank = self._request.place.replicas, self._request.place.rank
            self._together(partial(self._assembly.compile, made, replicas), _nothing_to_compare)
            local = set[str]().union(*(each.parameters(rank) | each.buffers(rank) for each in graphs.values()))
            self._state.move(local, self._request.place.device)
            runner = self._assembly.runner(made, replicas, self.ownership.ranks_of_parameter, self.ownership.sharded)
            self._prepared.keep(call.keys, PreparedStep(made, runner))
            self._forget_all_but(call.keys)
            self._assembly.keep_only([*self._all_kept(), *graphs.values()])
        for key in dict.fromkeys(call.keys):  # in an order that all ranks have: it decides which graph is dropped
            for kept in (self._graphs, self._sized):
                if key in kept:
                    kept.use(key)
        return self._prepared.use(call.keys)

    def under(self, step: PreparedStep, schedule: Schedule) -> PreparedStep:
        """The same graphs under another table of computations, on the same ranks, without replicas; it is not kept.

        Called by all ranks.
        """
        table = CheckedTable(schedule, training=True, shards=self._shards, flow=step.lowered.table.flow)
        work = partial(lowered, self._request, step.lowered.graphs, table, self._assembly.regions)
        made = self._together(work, lambda lowered: lowered.facts)
        self._together(partial(self._assembly.compile, made, None), _nothing_to_compare)
        owned = self.ownership
        return PreparedStep(made, self._assembly.runner(made, None, owned.ranks_of_parameter, owned.sharded))

    def _together(self, work: Callable[[], T], facts: Callable[[T], Facts]) -> T:
        """The result of `work`, which the ranks of a pipeline have alike, once all pipelines that share layers have theirs.

        Those have programs of their own, since each rank along `tp` computes another part of a layer.
        """
        if self._columns is None:
            return self._agreement.together(work, facts)
        return self._columns.together(partial(self._agreement.together, work, facts), _nothing_to_compare)

    def _check_columns(self, graphs: Mapping[GraphKey, CompiledGraph]) -> None:
        """Raise `CaptureError` on all ranks where a new graph has values that differ along `tp` and must not."""
        if self._columns is not None:
            new = [graph.captured.joint for key, graph in graphs.items() if self._kept_graph(key) is None]
            check = partial(check_shared_layers, self._request)
            self._columns.together(lambda: [check(joint) for joint in new], _nothing_to_compare)

    def _lower(self, call: StepCall) -> tuple[dict[GraphKey, CompiledGraph], Lowered]:
        """Compile the graphs that are new, and lower the call; nothing is kept yet."""
        place, memory = self._request.place, self._request.options.memory
        graphs, table = self._compile_graphs(call, len(call.parts))
        each = [graphs[key] for key in call.keys]
        check_same_results(each)
        check_same_updates([graph.captured.updates for graph in each])
        if not call.training:
            check_mergeable([graph.output_shapes for graph in each], [leading_size(part) for part in call.parts])
        self.ownership.check_copies(self.first or each[0])
        for graph in graphs.values():
            self._state.check_memory([*graph.parameters(place.rank), *graph.buffers(place.rank)])
        cap = memory.caps(place.ranks) if call.training else None
        return graphs, lowered(self._request, each, table, self._assembly.regions, cap)

    def _compile_graphs(self, call: StepCall, microbatches: int) -> tuple[dict[GraphKey, CompiledGraph], CheckedTable]:
        """The graph of each kind of microbatch in a call, and the table for so many microbatches."""
        graphs: dict[GraphKey, CompiledGraph] = {}
        first = self.first

        def table_for(stages: int) -> CheckedTable:
            return self.tables.checked(stages, microbatches, call.training)

        known = {key: self._kept_graph(key) or self._sizes.find(key, part) for key, part in call.distinct.items()}
        new = {key: part for key, part in call.distinct.items() if known[key] is None}
        open_sizes = [self._sizes.open(key, part) for key, part in new.items()]
        made = capture_graphs(self._request, self._agreement, list(new.values()), call.training, open_sizes)
        if new:
            self._keys.after_capture()
        captured = dict(zip(new, made, strict=True))
        for key, part in call.distinct.items():
            graph = known[key] or self._compiled(captured[key], part, table_for, first)
            first = first or graph
            check_homes(first, graph)
            graphs[key] = graph
        return graphs, table_for(len(graph.program.stages))

    def _compiled(
        self, captured: CapturedGraph, part: FlatMicrobatch, table_for: TableFor, first: CompiledGraph | None
    ) -> CompiledGraph:
        """A captured graph, compiled; one with open sizes for the sizes of `part`."""
        graph = compile_graph(self._request, captured, table_for, first)
        if captured.joint.symbols is None:
            return graph
        values = captured.joint.symbols.values(part.shapes)
        assert values is not None, "a graph does not hold for the sizes of which it was captured"
        return graph.at(values)

    def _facts_of(self, result: tuple[object, Lowered]) -> Facts:
        """The lines about a lowered call, and the values of parameters that several ranks hold."""
        _, made = result
        rank = self._request.place.rank
        owners = made.graphs[0].ranks_of_parameter.items()
        shared = [fqn for fqn, ranks in owners if len(ranks) > 1 and rank in ranks]
        return made.facts.joined(facts.of_copies(self._state, shared))

    # ------------------------------------------------------------------------------------------------ keeping

    def _kept_graph(self, key: GraphKey) -> CompiledGraph | None:
        return self._graphs.get(key) or self._sized.get(key)

    def _all_kept(self) -> list[CompiledGraph]:
        return [*self._graphs.values(), *self._sized.values(), *self._sizes.graphs()]

    def _keep(self, graphs: Mapping[GraphKey, CompiledGraph], call: StepCall) -> None:
        """Keep graphs on which all ranks agreed, the one used last at the end; the first decides which memory goes back."""
        begins = self.first is None
        for key, graph in graphs.items():
            self.first = self.first or graph
            self._sizes.keep(key, call.distinct[key], graph)
            before = next(reversed(self._graphs), None)
            if graph.general is not None:
                self._sized.keep(key, graph)
            elif key in self._graphs:
                self._graphs.use(key)
            elif self._graphs.keep(key, graph) is not None and before is not None:
                _LOG.warning(
                    "the %d graphs that are kept at most are used up, so the one used longest ago was dropped. The latest was "
                    "captured because %s. Pad to a few shapes, pass numbers that change as tensors, or raise "
                    "debug=graphpp.Debug(max_graphs=...).",
                    self._request.options.debug.max_graphs,
                    key.difference(before),
                )
        if begins:
            self.ownership.release_if_asked()
            self.ownership.shard_if_asked()

    def _forget_all_but(self, latest: tuple[GraphKey, ...]) -> None:
        """Drop the runners, but the latest, that use a graph that is no longer kept."""
        for keys in [keys for keys in self._prepared if keys != latest and any(self._kept_graph(key) is None for key in keys)]:
            del self._prepared[keys]


def _facts_of_graphs(made: tuple[Mapping[GraphKey, CompiledGraph], CheckedTable]) -> Facts:
    return facts.of_call([graph.facts for graph in made[0].values()], made[1])


def _nothing_to_compare(_: object) -> Facts:
    """Ranks tell each other only that none of them failed."""
    return Facts({})
