"""Capture on one rank, and give the graph to the other ranks of the pipeline.

Contract
--------
- The first rank of the group captures and writes the graph as data (`capture/transfer/`). All ranks, the first one too, read
  this text. So all have the same graph, also where a trace depends on the order of a set.
- A rank takes the graph only if the code and data that its own model and loss reach are those of the first rank
  (`capture/transfer/reachable.py`). If the ranks differ or cannot be compared, or the graph has an object that cannot be
  written, each rank captures by itself. The compiled programs are compared afterwards, so ranks whose models differ raise
  `MismatchError`.
- With `debug.keep_graphs` the first rank looks for a kept graph first, and keeps the graph that it captured
  (`compiler/kept_graphs.py`). So does the only rank of a pipeline.
- Called by all ranks of the group. If the capture fails, all ranks raise: the first rank its own error, the others
  `MismatchError` with the first rank's message.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.outputs import check_output_leaves
from graphpp.capture.sizes.open_sizes import Open, with_open_sizes
from graphpp.capture.trace import CapturedGraph, capture
from graphpp.capture.transfer.code_trail import CodeTrail
from graphpp.capture.transfer.process_state import process_state
from graphpp.capture.transfer.reachable import Reachable
from graphpp.capture.transfer.read_graph import read_graph
from graphpp.capture.transfer.write_graph import WriteError, write_graph
from graphpp.compiler.kept_graphs import KeptGraphs
from graphpp.compiler.request import CompileRequest
from graphpp.parallel.agreement import Agreement
from graphpp.progress import working

_LOG = logging.getLogger("graphpp")


def capture_graph(
    request: CompileRequest,
    example: FlatMicrobatch,
    training: bool,
    trail: CodeTrail | None = None,
    open_sizes: Open | None = None,
) -> CapturedGraph:
    """Capture the model on an example microbatch, in this process; `trail` notes the code that runs.

    The graph is that of a plain loop, also where the caller has switched autograd off. If it cannot hold for `open_sizes`, the
    graph holds for the sizes of the example, and `fixed_because` says why. Raises `CaptureError`.
    """
    began = time.perf_counter()
    with working("capturing the model"), torch.inference_mode(False), torch.enable_grad():
        model, loss, device = request.model, request.loss, request.place.device
        run = partial(capture, model, loss, training=training, param_dtype=request.options.parallel.param_dtype)
        captured = run(example.microbatch(), device, trail=trail)
        check_output_leaves(captured)
        if open_sizes:
            ordered = example.with_ordered_integers().microbatch()
            run = partial(run, ordered, device, varying=open_sizes)
            captured = with_open_sizes(run, captured, example, open_sizes, request.options.debug.dynamic is True)
    return replace(captured, seconds=time.perf_counter() - began)


def capture_graphs(
    request: CompileRequest,
    agreement: Agreement,
    examples: Sequence[FlatMicrobatch],
    training: bool,
    open_sizes: Sequence[Open],
) -> list[CapturedGraph]:
    """A graph for each example microbatch, captured by the first rank of the group. Called by all ranks of the group.

    `open_sizes`: for each example the sizes that the graph is to leave open. Raises `CaptureError`, and `MismatchError` if the
    first rank has failed.
    """
    if not examples:
        return []
    wanted = list(zip(examples, open_sizes, strict=True))
    several, keeps = agreement.several, request.options.debug.keep_graphs
    held, digest = _reachable(request) if several or keeps else (None, b"")
    if several and not agreement.same(digest):
        held = None
    if held is None:
        if several:
            _LOG.info("each rank captures by itself: model and loss cannot be compared, or differ between ranks")
        return [capture_graph(request, each, training, open_sizes=sizes) for each, sizes in wanted]
    capturing = _CapturingRank(request, held, wanted, training)
    if not several:
        return [capturing.obtained(*each)[0] for each in wanted]
    began = time.perf_counter()
    sent = json.loads(agreement.from_first(capturing.written))
    if "refused" in sent:
        _LOG.info("each rank captures by itself: the graph of the first rank cannot be sent, because of %s", sent["refused"])
        return capturing.captured or [capture_graph(request, each, training, open_sizes=sizes) for each, sizes in wanted]
    device = request.place.device
    graphs = capturing.read_again or [read_graph(text, device, held) for text in sent["graphs"]]
    return [replace(graph, seconds=(time.perf_counter() - began) / len(graphs)) for graph in graphs]


@dataclass
class _CapturingRank:
    """The work of the first or only rank: `captured` has its graphs, and `read_again` the graphs that all ranks read."""

    request: CompileRequest
    held: Reachable
    wanted: Sequence[tuple[FlatMicrobatch, Open]]
    training: bool
    captured: list[CapturedGraph] = field(default_factory=list)
    read_again: list[CapturedGraph] = field(default_factory=list)

    def written(self) -> bytes:
        """The graphs as JSON, or the reason why they cannot be written or read again. Raises `CaptureError`."""
        made = [self.obtained(*each) for each in self.wanted]
        self.captured += [graph for graph, _ in made]
        texts = [text for _, text in made]
        refused = next((text for text in texts if isinstance(text, Exception)), None)
        try:
            if refused is None:
                self.read_again += [read_graph(str(text), self.request.place.device, self.held) for text in texts]
        except Exception as error:  # each rank can still capture, so nothing is lost
            _LOG.warning("a captured graph cannot be read by other ranks: please report this fault", exc_info=error)
            refused = error
        if refused is not None:
            return json.dumps({"refused": f"{type(refused).__name__}: {refused}"}).encode()
        return json.dumps({"graphs": texts}).encode()

    def obtained(self, example: FlatMicrobatch, open_sizes: Open) -> tuple[CapturedGraph, str | Exception]:
        """The graph of an example, from the cache folder or captured, and its text, or why it cannot be written."""
        kept = self._kept if not open_sizes else None
        text = kept.find(example, self.training) if kept is not None else None
        if text is not None:
            began = time.perf_counter()
            try:
                graph = read_graph(text, self.request.place.device, self.held)
                return replace(graph, seconds=time.perf_counter() - began), text
            except Exception as error:  # the model can still be captured
                _LOG.warning("a kept graph cannot be read: please report this fault", exc_info=error)
        trail = CodeTrail() if kept is not None and kept.has_key else None
        before = _values(self.request) if trail is not None else b""
        graph = capture_graph(self.request, example, self.training, trail, open_sizes)
        try:
            text = write_graph(graph, self.request.place.device, self.held)
        except WriteError as error:
            return graph, error
        except Exception as error:  # each rank can still capture
            _LOG.warning("a captured graph cannot be written: please report this fault", exc_info=error)
            return graph, error
        if kept is not None and trail is not None:
            kept.keep(graph, text, trail, changed=_values(self.request) != before)
        return graph, text

    @cached_property
    def _kept(self) -> KeptGraphs | None:
        keeps = self.request.options.debug.keep_graphs
        try:
            return KeptGraphs(self.held, self.request.place.device) if keeps else None
        except OSError as error:
            _LOG.warning("the captured graphs cannot be kept for later runs: %s", error)
            return None


def _values(request: CompileRequest) -> bytes:
    """A digest of the present values of the objects of model and loss; one like no other if an object cannot be read."""
    try:
        return Reachable(by_value=True, model=request.model, loss=request.loss).exact
    except Exception:  # as in `_reachable`
        return secrets.token_bytes(hashlib.sha256().digest_size)


def _reachable(request: CompileRequest) -> tuple[Reachable | None, bytes]:
    """The objects of model and loss, and their digest; None and bytes of no other rank if an object cannot be read."""
    try:
        around = *process_state(), request.options.parallel.param_dtype  # on which a trace depends, and no code names
        held = Reachable(model=request.model, loss=request.loss, process=around)
    except Exception as error:  # `UnreadableError`, and any error of a property of the user's classes
        _LOG.info("an object of the model or the loss cannot be compared with other ranks: %s", error)
        return None, secrets.token_bytes(hashlib.sha256().digest_size)
    return held, held.digest
