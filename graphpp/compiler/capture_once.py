"""Capture on one rank, and give the graph to the other ranks of the pipeline.

Contract
--------
- The first rank of the group captures and writes the graph as data (`capture/transfer/`). All ranks, the first one too, read
  this text. So all have the same graph, also where a trace depends on the order of a set.
- A rank takes the graph only if the code and data that its own model and loss reach are those of the first rank
  (`capture/transfer/reachable.py`). If the ranks differ or cannot be compared, or the graph has an object that cannot be
  written, each rank captures by itself. The compiled programs are compared afterwards, so ranks whose models differ raise
  `MismatchError`.
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

import torch

from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.outputs import check_output_leaves
from graphpp.capture.trace import CapturedGraph, capture
from graphpp.capture.transfer.process_state import process_state
from graphpp.capture.transfer.reachable import Reachable
from graphpp.capture.transfer.read_graph import read_graph
from graphpp.capture.transfer.write_graph import WriteError, write_graph
from graphpp.compiler.request import CompileRequest
from graphpp.parallel.agreement import Agreement

_LOG = logging.getLogger("graphpp")


def capture_graph(request: CompileRequest, example: FlatMicrobatch, training: bool) -> CapturedGraph:
    """Capture the model on an example microbatch, in this process.

    The graph is that of a plain loop, also where the caller has switched autograd off. Raises `CaptureError`.
    """
    began = time.perf_counter()
    with torch.inference_mode(False), torch.enable_grad():
        captured = capture(request.model, request.loss, example.microbatch(), request.place.device, training=training)
    check_output_leaves(captured)
    return replace(captured, seconds=time.perf_counter() - began)


def capture_graphs(
    request: CompileRequest, agreement: Agreement, examples: Sequence[FlatMicrobatch], training: bool
) -> list[CapturedGraph]:
    """A graph for each example microbatch, captured by the first rank of the group. Called by all ranks of the group.

    Raises `CaptureError`, and `MismatchError` if the first rank has failed.
    """
    if not examples:
        return []
    if not agreement.several:
        return [capture_graph(request, example, training) for example in examples]
    held, digest = _reachable(request)
    if not agreement.same(digest) or held is None:
        _LOG.info("each rank captures by itself: model and loss cannot be compared, or have other attributes or code elsewhere")
        return [capture_graph(request, example, training) for example in examples]
    began = time.perf_counter()
    first = _FirstRank(request, held, examples, training)
    sent = json.loads(agreement.from_first(first.written))
    if "refused" in sent:
        _LOG.info("each rank captures by itself: the graph of the first rank cannot be sent, because of %s", sent["refused"])
        return first.captured or [capture_graph(request, example, training) for example in examples]
    device = request.place.device
    graphs = first.read_again or [read_graph(text, device, held) for text in sent["graphs"]]
    return [replace(graph, seconds=(time.perf_counter() - began) / len(graphs)) for graph in graphs]


@dataclass
class _FirstRank:
    """The work of the rank that captures: `captured` has its graphs, and `read_again` the graphs that all ranks read."""

    request: CompileRequest
    held: Reachable
    examples: Sequence[FlatMicrobatch]
    training: bool
    captured: list[CapturedGraph] = field(default_factory=list)
    read_again: list[CapturedGraph] = field(default_factory=list)

    def written(self) -> bytes:
        """The graphs as JSON, or the reason why they cannot be written or read again. Raises `CaptureError`."""
        self.captured += [capture_graph(self.request, example, self.training) for example in self.examples]
        device = self.request.place.device
        try:
            texts = [write_graph(each, device, self.held) for each in self.captured]
            self.read_again += [read_graph(text, device, self.held) for text in texts]
        except Exception as error:  # each rank can still capture, so nothing is lost
            if not isinstance(error, WriteError):
                _LOG.warning("a captured graph cannot be sent to other ranks: please report this fault", exc_info=error)
            return json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode()
        return json.dumps({"graphs": texts}).encode()


def _reachable(request: CompileRequest) -> tuple[Reachable | None, bytes]:
    """The objects of model and loss, and their digest; None and bytes of no other rank if an object cannot be read."""
    try:
        held = Reachable(model=request.model, loss=request.loss, process=process_state())
    except Exception as error:  # `UnreadableError`, and any error of a property of the user's classes
        _LOG.info("an object of the model or the loss cannot be compared with other ranks: %s", error)
        return None, secrets.token_bytes(hashlib.sha256().digest_size)
    return held, held.digest
