"""Capture on one rank, and send the graph to the other ranks of the pipeline.

- The group's first rank captures and serialises the graph (`capture/transfer/`). All ranks, the first included, read this text,
  so all have the same graph even if tracing depends on the order of a set.
- A rank accepts the graph only if its model and loss have the first rank's code and data (`capture/transfer/digest.py`). If
  they differ or cannot be compared, or the graph cannot be serialised, each rank captures by itself. Compiled programs are
  compared later, so different models raise `MismatchError`.
- With `artifact=` the first rank looks for the graph in the folder, and saves a graph that it captured (`artifact.py`).
- All ranks of the group call these functions. If the capture fails, the first rank raises its error and the others raise
  `MismatchError` with its message.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.outputs import with_unseen
from graphpp.capture.sizes.open_sizes import Open, noted, with_open_numbers, with_open_sizes
from graphpp.capture.trace import CapturedGraph, capture
from graphpp.capture.transfer.digest import ModelDigest, UnreadableError
from graphpp.capture.transfer.read_graph import read_graph
from graphpp.capture.transfer.write_graph import WriteError, write_graph
from graphpp.capture.watch.audit import Audit
from graphpp.capture.watch.operators import Operations, first_difference, note_operators, same_but_for_sizes
from graphpp.compiler.artifact import Artifact
from graphpp.compiler.request import CompileRequest
from graphpp.errors import CaptureError, GraphPPError
from graphpp.log import logger
from graphpp.parallel.agreement import Agreement
from graphpp.passes.forward.change_forward import ForwardOptions
from graphpp.passes.forward.cut_words import WordParts
from graphpp.progress import working

_LOG = logger(__name__)


@dataclass(frozen=True)
class Wanted:
    """An example microbatch to capture, and the dimensions to leave open, by path of the tensor. `alike`: an earlier microbatch
    of other sizes, and its graph for these sizes alone (None: none)."""

    example: FlatMicrobatch
    open_sizes: Open = field(default_factory=dict)
    alike: tuple[FlatMicrobatch, CapturedGraph] | None = None


def capture_graph(request: CompileRequest, wanted: Wanted, training: bool, words: WordParts | None = None) -> CapturedGraph:
    """Capture the model on an example microbatch, in this process, with autograd on.

    A graph with open sizes is compared with one for the example's sizes alone, or with that of an earlier microbatch if the
    code runs the same operators for both. If the graph cannot be valid for the open sizes, it is specialised to the example's,
    and `fixed_because` says why; so does `plain_because` for the example's numbers. Raises `CaptureError`.
    """
    began, example, open_sizes = time.perf_counter(), wanted.example, wanted.open_sizes
    with working("capturing the model"), torch.inference_mode(False), torch.enable_grad():
        model, loss, device = request.model, request.loss, request.place.device
        param_dtype, outputs = request.options.parallel.param_dtype, request.options.memory.outputs
        forward = ForwardOptions(bool(open_sizes), request.options.memory.logits_tokens, words)
        run = partial(capture, model, loss, training=training, param_dtype=param_dtype, outputs=outputs, forward=forward)
        plain = example.with_numbers(frozenset())
        alone = cache(lambda: noted(with_unseen(run(plain.microbatch(), device)), plain))
        numbers = dict.fromkeys(example.numbers, ())
        captured = None
        if open_sizes:
            ordered, some = example.with_ordered_integers().microbatch(), request.options.debug.dynamic is True
            general = cache(partial(run, ordered, device, varying={**open_sizes, **numbers}))
            if not numbers and wanted.alike is not None and _runs_alike(request, wanted.alike[0], example, training):
                captured = with_open_sizes(general, wanted.alike[1], wanted.alike[0], open_sizes, some)
            if captured is None or captured.fixed_because:
                captured = with_open_sizes(general, alone(), example, open_sizes, some)
        reason = captured.fixed_because if captured is not None else ""
        captured = alone() if captured is None or reason else captured
        if numbers and (reason or not open_sizes):
            captured = with_open_numbers(partial(run, device=device), captured, example)
        captured = replace(captured, fixed_because=reason)
    return replace(captured, seconds=time.perf_counter() - began)


def _runs_alike(request: CompileRequest, one: FlatMicrobatch, other: FlatMicrobatch, training: bool) -> bool:
    """Whether the code runs the same operators for two microbatches, but for numbers that follow from their sizes.

    False if the second call changes the operators of the first: the code keeps numbers of a call outside the model.
    """
    sizes = [pair for shapes in zip(one.shapes, other.shapes, strict=True) for pair in zip(*shapes, strict=True)]
    try:
        first, second, again = (_operators(request, each, training) for each in (one, other, one))
    except CaptureError:  # the code cannot be noted
        return False
    return first_difference(first, again) is None and same_but_for_sizes(first, second, sizes)


def _operators(request: CompileRequest, example: FlatMicrobatch, training: bool) -> Operations:
    """The operators that forward and loss run for a microbatch without numbers as inputs."""
    batch, device = example.without_data().microbatch(), request.place.device
    with torch.inference_mode(False), torch.enable_grad():
        param_dtype = request.options.parallel.param_dtype
        return note_operators(request.model, request.loss, batch, device, training=training, param_dtype=param_dtype)


def loaded_or_captured(request: CompileRequest, example: FlatMicrobatch, words: WordParts | None = None) -> CapturedGraph:
    """The training graph for `graphpp.verify`: loaded from the `artifact=` folder if given, else captured.

    Raises `CaptureError`, and `GraphPPError` if the folder has no graph for such a microbatch.
    """
    if request.options.artifact is None:
        return capture_graph(request, Wanted(example), True, words)
    held, digest = _compared(request, several=False)
    found = None if held is None else _Capturing(request, held, digest, True, words).loaded(example, {})
    if found is None:
        raise GraphPPError(
            f"artifact: {request.options.artifact} has no graph of this model for such a microbatch, so there is nothing to "
            "verify: run a step of graphpp.compile(artifact=) with microbatches of this shape, or leave artifact= out"
        )
    return found[0]


def capture_graphs(
    request: CompileRequest,
    agreement: Agreement,
    wanted: Sequence[Wanted],
    training: bool,
    words: WordParts | None = None,
) -> list[CapturedGraph]:
    """A graph for each example microbatch, captured by the first rank. Called by all ranks of the group.

    Raises `CaptureError`, and `MismatchError` if the first rank
    failed.
    """
    if not wanted:
        return []
    examples = [each.example for each in wanted]
    several, folder = agreement.several, request.options.artifact
    held, digest = _compared(request, several) if several or folder is not None else (None, b"")
    if several and not agreement.same(digest):
        held = None
    if held is None:
        if folder is not None:
            _LOG.warning("artifact=%s is not used, because model and loss cannot be compared with another process's", folder)
        elif several:
            _LOG.info("each rank captures by itself: model and loss cannot be compared, or differ between ranks")
        made = [capture_graph(request, each, training, words) for each in wanted]
        return _audited(request, made, examples, training)
    capturing = _Capturing(request, held, digest, training, words)
    if not several:
        return _audited(request, [capturing.obtained(each)[0] for each in wanted], examples, training)
    began = time.perf_counter()
    sent = json.loads(agreement.from_first(partial(capturing.written, wanted)))
    if "refused" in sent:
        _LOG.info("each rank captures by itself: the graph of the first rank cannot be sent, because of %s", sent["refused"])
        made = capturing.captured or [capture_graph(request, each, training, words) for each in wanted]
        return _audited(request, made, examples, training)
    graphs = capturing.read_again or [capturing.read(text) for text in sent["graphs"]]
    graphs = [replace(graph, seconds=(time.perf_counter() - began) / len(graphs)) for graph in graphs]
    return _audited(request, graphs, examples, training) if capturing.read_again else graphs


def _audited(
    request: CompileRequest, graphs: Sequence[CapturedGraph], examples: Sequence[FlatMicrobatch], training: bool
) -> list[CapturedGraph]:
    """The graphs with audits of the state that they depend on (`capture/watch/audit.py`), on a rank that captured them."""
    debug = request.options.debug

    def audit(example: FlatMicrobatch) -> Callable[[], None]:
        note = partial(_operators, request, example.with_numbers(frozenset()).without_data(), training)
        return Audit(note, debug.audit, by_time=request.place.tp_group is None, told=request.told).check

    return [replace(graph, audit=audit(example)) for graph, example in zip(graphs, examples, strict=True)]


@dataclass
class _Capturing:
    """The work of the rank that captures. `captured`: its graphs; `read_again`: these graphs after serialisation.

    `held`: the objects of model and loss by name; `digest`: the digest of these objects.
    """

    request: CompileRequest
    held: ModelDigest
    digest: bytes
    training: bool
    words: WordParts | None = None
    captured: list[CapturedGraph] = field(default_factory=list)
    read_again: list[CapturedGraph] = field(default_factory=list)

    def written(self, wanted: Sequence[Wanted]) -> bytes:
        """The graphs as JSON, or the reason why they cannot be written or read again. Raises `CaptureError`."""
        made = [self.obtained(each) for each in wanted]
        self.captured += [graph for graph, _ in made]
        texts = [text for _, text in made]
        refused = next((text for text in texts if isinstance(text, Exception)), None)
        try:
            if refused is None:
                again = [self.read(str(text)) for text in texts]
                pairs = zip(again, made, strict=True)
                self.read_again += [replace(one, operations=graph.operations) for one, (graph, _) in pairs]
        except Exception as error:  # each rank can still capture
            _LOG.warning("a captured graph cannot be read by other ranks: please report this fault", exc_info=error)
            refused = error
        if refused is not None:
            return json.dumps({"refused": f"{type(refused).__name__}: {refused}"}).encode()
        return json.dumps({"graphs": texts}).encode()

    def read(self, text: str) -> CapturedGraph:
        """Deserialise a graph, with the objects of this process. Raises `CaptureError`."""
        return read_graph(text, self.request.place.device, self.held)

    def obtained(self, wanted: Wanted) -> tuple[CapturedGraph, str | Exception]:
        """The loaded or captured graph of an example, with its text or the error that prevented writing it."""
        found = self.loaded(wanted.example, wanted.open_sizes)
        if found is not None:
            return found
        graph = capture_graph(self.request, wanted, self.training, self.words)
        try:
            text = write_graph(graph, self.request.place.device, self.held)
        except Exception as error:  # each rank can still capture
            about = logging.INFO if isinstance(error, WriteError) and self._artifact is None else logging.WARNING
            _LOG.log(about, "a captured graph can be neither sent to other ranks nor saved, because of %s", error)
            return graph, error
        if self._artifact is not None:
            self._artifact.save(text, wanted.example, self.training, wanted.open_sizes)
        return graph, text

    def loaded(self, example: FlatMicrobatch, open_sizes: Open) -> tuple[CapturedGraph, str] | None:
        """The graph of an example and its text from the `artifact=` folder; None if there is none."""
        began = time.perf_counter()
        text = None if self._artifact is None else self._artifact.load(example, self.training, open_sizes)
        if text is None:
            return None
        try:
            return replace(self.read(text), seconds=time.perf_counter() - began), text
        except Exception as error:  # the model can still be captured
            _LOG.warning("a saved graph cannot be read: please report this fault", exc_info=error)
            return None

    @property
    def _artifact(self) -> Artifact | None:
        folder = self.request.options.artifact
        return None if folder is None else Artifact(folder, self.request, self.held.in_order, self.words)


def _compared(request: CompileRequest, several: bool) -> tuple[ModelDigest | None, bytes]:
    """The objects of model and loss, and their digest; if they cannot be compared: None, and bytes that differ between ranks.

    `several`: also refuse code that reads the process or its environment, since ranks may capture different graphs of it.
    """
    try:
        held = ModelDigest(request.model, request.loss, request.options.parallel.param_dtype)
        if several and held.per_process is not None:
            raise UnreadableError(f"{held.per_process}, which asks for the process or its environment")
    except Exception as error:  # `UnreadableError`, and any error of a property of the user's classes
        _LOG.info("the model or the loss cannot be compared with those of another process, because of %s", error)
        return None, secrets.token_bytes(hashlib.sha256().digest_size)
    return held, held.digest
