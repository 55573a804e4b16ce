"""The graphs and runners of a pipeline, each made once, on all ranks alike.

Contract:
- There is one graph per key of a microbatch, or one for several sizes (`varying_sizes.py`), and one runner per key of a call.
- At most `max_graphs` graphs are kept, as many graphs with open sizes, and all graphs of the latest call. The least recently
  used graph is dropped first, with a warning that names the argument that keeps changing.
- A new call is captured, lowered, agreed on and compiled. A failure on one rank is a failure on all, and every rank keeps the
  same graphs and runners.
- The first graph decides which rank holds which parameter (`ownership/`); a later graph that reads one elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graphpp.batch.loss_weights import LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.sizes.open_sizes import Open
from graphpp.capture.trace import CapturedGraph
from graphpp.compiler import facts
from graphpp.compiler.assemble import Assembly
from graphpp.compiler.build import Lowered, check_homes, check_same_results, lowered
from graphpp.compiler.capture_once import Wanted, capture_graphs
from graphpp.compiler.compile_graph import CompiledGraph, TableFor, compile_graph
from graphpp.compiler.exchanged_values import check_shared_layers
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.word_stages import order_of_parts
from graphpp.errors import GraphPPError
from graphpp.log import logger
from graphpp.ownership.ownership import Ownership
from graphpp.parallel.agreement import Agreement, Round
from graphpp.parallel.facts import Facts
from graphpp.pipeline.cache_key import CallKey, GraphKey, KeyMaker, Recent, StepCall, check_same_updates
from graphpp.pipeline.varying_sizes import VaryingSizes, for_sizes
from graphpp.planner.tables import CheckedTable, ShardPolicy, Tables
from graphpp.runtime.messages.mailbox import message_flow
from graphpp.runtime.model_state import ModelState, tensor_lines
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.table.schedule import Schedule

_LOG = logger(__name__)
_SHAPES = "the shapes of the microbatches, which must be equal on ranks along ep and cp, whose models exchange values"
_PREPARED = "a graph and its runner"
_RUNNERS = 8  # how many runners are kept for each graph that may be kept


@dataclass(frozen=True)
class PreparedStep:
    """A call that can run: lowered and compiled, with its runner and the facts that ranks compare before each such call."""

    lowered: Lowered
    runner: GraphPPRunner
    facts: tuple[Facts, Facts] = (Facts(), Facts())

    def inputs(self, parts: Sequence[FlatMicrobatch]) -> list[Mapping[str, torch.Tensor]]:
        """The graphs' input tensors for each microbatch; a graph with open sizes takes integers in memory order."""
        pairs = zip(parts, self.lowered.graphs, strict=True)
        return [(part if graph.general is None else part.with_ordered_integers()).tensors for part, graph in pairs]

    def reads(self) -> set[str]:
        """The paths of the microbatch tensors that this rank's stages read."""
        return set().union(*(graph.reads(self.runner.place.rank) for graph in self.lowered.graphs))


class GraphCache:

    def __init__(self, request: CompileRequest, state: ModelState, agreement: Agreement) -> None:
        """`agreement`: of the ranks that compute the same microbatches."""
        options, place = request.options, request.place
        self._request, self._state = request, state
        self._pipeline = agreement if place.tp_group is None else place.agreement(place.group)
        # Ranks along tp run different programs, since each computes another part of a layer: they compare no facts.
        self._groups = (self._pipeline,) if place.tp_group is None else (self._pipeline, agreement)
        self._modules = dict(request.model.named_modules())
        limit = options.debug.max_graphs
        self._keys = KeyMaker(request.model, request.loss, place.device.type, _RUNNERS * limit)
        self._graphs: Recent[GraphKey, CompiledGraph] = Recent(limit)
        self._sizes = VaryingSizes(options.debug.dynamic, limit, warns=place.rank == 0)
        self._prepared: Recent[CallKey, PreparedStep] = Recent(_RUNNERS * limit)
        self._assembly = Assembly(request, state)
        self.recorded = self._assembly.recorded
        self.ownership = Ownership(state, place, options, self.captured, self._keys.forget_values, self._pipeline)
        self._shards = ShardPolicy(options.parallel.keep) if place.sharding is not None else None
        self.tables = Tables(options.schedule, place.ranks, self._shards, message_flow(place.group, place.device))
        self.first: CompiledGraph | None = None
        self._reasons = {""}  # why graphs were captured again
        self._said = {""}  # sentences about parameters without a gradient

    def call(self, parts: Sequence[FlatMicrobatch], weighting: LossWeighting, *, training: bool) -> StepCall:
        """A call over these microbatches, with the model in its current state.

        Raises `GraphPPError` as `KeyMaker.key` does, and where another pipeline has trained a parameter on another rank;
        `CaptureError` if state of a known graph has changed unseen (`capture/watch/audit.py`).
        """
        parts = self._sizes.with_numbers(training, parts)
        key = self._keys.key(training, [part.signature for part in parts])
        if self.first is not None:
            self.ownership.check_copies(self.first)
            if self.ownership.is_adapted:
                self.ownership.check_rows()
        if self.ownership.sharded is not None:
            self.ownership.sharded.check(self._state)
        if key in self._prepared:
            for audit in dict.fromkeys(graph.captured.audit for graph in self._prepared[key].lowered.graphs):
                if audit is not None:
                    audit()
        return StepCall(parts, key, weighting)

    def recapture(self) -> None:
        self._keys.recapture()

    def after_step(self, call: StepCall, step: PreparedStep) -> None:
        """Change numbers in attributes of the model as the microbatches do in eager, and note a training step."""
        if call.training:
            self.ownership.after_training()
        self._keys.after_step(call, [graph.captured.updates for graph in step.lowered.graphs])

    def facts(self, call: StepCall) -> tuple[Facts, Facts]:
        """The facts of a call that the ranks of a pipeline compare, and the facts that ranks along `ep` and `cp` compare."""
        step = self._prepared.get(call.key)
        return self._facts(call, self._kept(call)) if step is None else step.facts

    def _facts(self, call: StepCall, kept: str) -> tuple[Facts, Facts]:
        both = {
            "the call": ["step" if call.training else "eval"],
            "training flags": [f"{fqn}.training={module.training}" for fqn, module in self._modules.items()],
            "autocast": [str(call.key[0].around.autocast)],
            "what it has kept for this call": [kept],
        }
        number = {"the number of microbatches": [str(len(call.parts))], "the microbatch": call.describe()}
        pipeline = Facts({**both, **number, "the model": tensor_lines(self._request.model)})
        return pipeline, Facts({**both, _SHAPES: call.shapes()})

    def _kept(self, call: StepCall) -> str:
        """How much of a call without a runner is in the cache, in words that ranks compare.

        Without this comparison a rank that compiles and a rank that runs from its cache would deadlock.
        """
        new = [str(at) for at, (key, part) in enumerate(call.distinct.items()) if self._known(key, part) is None]
        if len(new) == len(call.distinct):
            reason = self._reason(call.key[0])
            return f"nothing yet, because {reason}" if reason else "nothing yet"
        return f"no graph for microbatches of shape {', '.join(new)}" if new else "a graph"

    def _reason(self, new: GraphKey) -> str:
        """Why a graph is new although the pipeline has graphs; empty if it has none."""
        before = next(reversed(self._prepared), None)
        return "" if before is None else self._keys.difference(new, before[0])

    def captured(self) -> CompiledGraph:
        """The first graph that was captured. Raises `GraphPPError` before anything is captured."""
        if self.first is None:
            raise GraphPPError("nothing is captured yet: give example= to graphpp.compile, or run a step first")
        return self.first

    def compile(self, call: StepCall, microbatches: int) -> None:
        with Round(*self._groups) as r:
            call, graphs, table = self._capture(call, microbatches)
            r.compare(facts.of_call([graph.facts for graph in graphs.values()], table))
        self._check_shared_layers(graphs)
        self._keep(graphs, call)

    def has(self, call: StepCall) -> bool:
        return call.key in self._prepared

    def prepare(self, call: StepCall) -> tuple[StepCall, PreparedStep]:
        """The runner of a call, from the cache or new, and the call with the numbers that became constants.

        Called by all ranks; raises on all ranks if it raises on one.
        """
        if call.key not in self._prepared:
            call = self._prepare(call)
        step = self._prepared.use(call.key)
        for key, graph in dict(zip(call.key, step.lowered.graphs, strict=True)).items():
            if graph.general is not None:
                self._sizes.use(graph.general)
            elif key in self._graphs:
                self._graphs.use(key)
        return call, step

    def _prepare(self, call: StepCall) -> StepCall:
        place = self._request.place
        try:
            with Round(*self._groups) as r:
                call, graphs, table = self._capture(call, len(call.parts))
                made = self._lower(call, graphs, table)
                r.compare(made.facts.adding(facts.of_copies(made.graphs[0].copies(self._state, place.rank))))
            self._check_shared_layers(graphs)
        except Exception:
            self._assembly.keep_only(self._all_kept())  # drops the regions of the refused call
            raise
        self._keep(graphs, call)
        with Round(*self._groups):
            self._assembly.compile(made)
        local = set[str]().union(*(each.parameters(place.rank) | each.buffers(place.rank) for each in graphs.values()))
        self._state.move(local, place.device)
        runner = self._assembly.runner(made, self.ownership.holders, self.ownership.sharded)
        self._prepared.keep(call.key, PreparedStep(made, runner, self._facts(call, _PREPARED)))
        self._forget_all_but(call.key)
        self._assembly.keep_only(self._all_kept())
        return call

    @property
    def recomputes(self) -> bool:
        """Whether the caller gave `memory.recompute`."""
        return self._request.options.memory.recompute is not None

    @property
    def offloads(self) -> bool:
        """Whether saved values wait in the host's memory."""
        return self._request.options.memory.offload is not None

    def under(self, step: PreparedStep, schedule: Schedule) -> PreparedStep:
        """The same graphs under another table of the same ranks, without replicas; not cached. Called by all ranks."""
        table, owned = CheckedTable(schedule, training=True, shards=self._shards, flow=step.lowered.table.flow), self.ownership
        with Round(*self._groups) as r:
            made = lowered(self._request, step.lowered.graphs, table, self._assembly.regions)
            r.compare(made.facts)
        with Round(*self._groups):
            self._assembly.compile(made, averages=False)
        return PreparedStep(made, self._assembly.runner(made, owned.holders, owned.sharded, averages=False))

    def _check_shared_layers(self, graphs: Mapping[GraphKey, CompiledGraph]) -> None:
        """Raise `CaptureError` on all ranks if a new graph has values that differ along `tp` and must be equal."""
        if self._request.place.tp_group is not None:
            with Round(self._groups[-1]):
                for key, graph in graphs.items():
                    if key not in self._graphs and all(graph.general is not each for each in self._sizes.graphs):
                        check_shared_layers(self._request, graph.captured.joint)

    def _capture(self, call: StepCall, microbatches: int) -> tuple[StepCall, dict[GraphKey, CompiledGraph], CheckedTable]:
        """The graph of each kind of microbatch in a call, captured if new, and the table for `microbatches`.

        Numbers of the call for which the model has no graph become constants.
        """
        graphs, first = dict[GraphKey, CompiledGraph](), self.first

        def table_for(stages: int) -> CheckedTable:
            return self.tables.checked(stages, microbatches, call.training)

        known = {key: self._known(key, part) for key, part in call.distinct.items()}
        new = {key: part for key, part in call.distinct.items() if known[key] is None}

        def capture(some: Sequence[GraphKey], open_sizes: Sequence[Open]) -> list[CapturedGraph]:
            for reason in {self._reason(key) for key in some} - self._reasons:
                if self._request.place.rank == 0:
                    _LOG.info("model and loss are captured again, because %s", reason)
                self._reasons.add(reason)
            names = () if first is None else first.captured.joint.parameters
            words = order_of_parts(self._request.options, self._request.place.ranks, table_for, names)
            pairs = zip(some, open_sizes, strict=True)
            wanted = [Wanted(new[key], sizes, self._sizes.alike(key, new[key])) for key, sizes in pairs]
            return capture_graphs(self._request, self._pipeline, wanted, call.training, words)

        captured = self._sizes.captured(new, capture)
        if new:
            self._keys.after_capture()
        plain = [(part, captured[key].plain_because) for key, part in new.items() if captured[key].plain_because]
        for part, reasons in plain:
            self._sizes.keep_plain(call.training, part, reasons)
        if plain:
            parts = [part.with_numbers(frozenset()) for part in call.parts]
            return self._capture(self.call(parts, call.weighting, training=call.training), microbatches)
        made = dict[int, CompiledGraph]()
        for key, part in call.distinct.items():
            graph = known[key] or for_sizes(self._compiled(captured[key], made, table_for, first), part)
            first = first or graph
            check_homes(first, graph)
            graphs[key] = graph
        return call, graphs, table_for(len(graph.program.stages))

    def _lower(self, call: StepCall, graphs: Mapping[GraphKey, CompiledGraph], table: CheckedTable) -> Lowered:
        place = self._request.place
        each = [graphs[key] for key in call.key]
        check_same_results(each)
        check_same_updates([graph.captured.updates for graph in each])
        self.ownership.check_copies(self.first or each[0])
        for graph in graphs.values():
            self._state.check_memory([*graph.parameters(place.rank), *graph.buffers(place.rank)])
        cap = self._request.options.memory.caps(place.ranks) if call.training else None
        return lowered(self._request, each, table, self._assembly.regions, cap)

    def _compiled(
        self, captured: CapturedGraph, made: dict[int, CompiledGraph], table_for: TableFor, first: CompiledGraph | None
    ) -> CompiledGraph:
        """`made`: the graphs of this call, by the identity of the captured one."""
        if id(captured) not in made:
            made[id(captured)] = compile_graph(self._request, captured, table_for, first)
        return made[id(captured)]

    def _known(self, key: GraphKey, part: FlatMicrobatch) -> CompiledGraph | None:
        return self._graphs.get(key) or self._sizes.find(key, part)

    def _all_kept(self) -> list[CompiledGraph]:
        used = (graph for step in self._prepared.values() for graph in step.lowered.graphs)
        return list(dict.fromkeys((*self._graphs.values(), *self._sizes.graphs, *used)))

    def _keep(self, graphs: Mapping[GraphKey, CompiledGraph], call: StepCall) -> None:
        """Keep graphs on which all ranks agreed; the first one decides which memory is freed."""
        begins = self.first is None
        for key, graph in graphs.items():
            self.first = self.first or graph
            said = graph.plan.without_gradient
            if said not in self._said and self._request.place.first_of_all:
                _LOG.warning("%s", said)
            self._said.add(said)
            self._sizes.keep(key, call.distinct[key], graph)
            before = next(reversed(self._graphs), None)
            if graph.general is not None:
                continue
            if key in self._graphs:
                self._graphs.use(key)
            elif self._graphs.keep(key, graph) is not None and before is not None:
                _LOG.warning(
                    "the %d graphs that are kept at most are used up, so the one used longest ago was dropped. The latest was "
                    "captured because %s. Pad to a few shapes, pass numbers that change as tensors, or raise "
                    "debug=graphpp.Debug(max_graphs=...).",
                    self._request.options.debug.max_graphs,
                    self._keys.difference(key, before),
                )
        if begins:
            self.ownership.release_if_asked()
        if not self.ownership.is_adapted:
            with Round(*self._groups):
                self.ownership.check_shardable()
            self.ownership.shard_if_asked()
        if begins and self.ownership.is_adapted:
            self.ownership.check_rows()

    def _forget_all_but(self, latest: CallKey) -> None:
        """Drop the runners, except the latest, that use a dropped graph."""
        kept = {*self._graphs.values(), *self._sizes.graphs}
        for key, step in list(self._prepared.items()):
            if key != latest and any((graph.general or graph) not in kept for graph in step.lowered.graphs):
                del self._prepared[key]
