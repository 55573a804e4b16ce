"""OpenTelemetry spans of training steps: one trace for all ranks, with a span for each rank and each of its actions.

The API of OpenTelemetry suffices; spans are recorded where the program has set up the SDK. A span is made after its step, from
the times that the step hook has got, so that no rank sends a message for it: every rank derives the ids of a step's trace from
bytes that the first rank chose once, and from the number of the step.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, SpanContext, TraceFlags, Tracer, TracerProvider
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

import graphpp
from graphpp.schedules.table.actions import Action, Kind

_NAMES: Mapping[Kind, str] = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "input_grad", Kind.W: "weight_grad", Kind.R: "recompute",
    Kind.OVERLAP_F_B: "overlap",
}  # fmt: skip
_NUMBERS = ("step", "rows", "waited", "sent_bytes", "shard_bytes", "grad_norm", "peak_bytes")


def trace_steps(
    pipe: graphpp.Pipeline, *, every: int = 1, tracer_provider: TracerProvider | None = None
) -> RemovableHandle:
    """Trace every `every`-th training step of `pipe`. Called by all ranks; returns the handle of the step hook.

    A span `graphpp.step`, which the first rank records, has a child `graphpp.rank` for each rank, with a child for each action.
    All are in the trace of the span that is current on the first rank during this call; without one, each step is a trace.
    `tracer_provider`: None for the global one. A traced step waits for the GPU before it begins, as `register_step_hook` with
    `actions=True` does. Raises `MismatchError` if another rank does not call, `GraphPPError` for another `every`.
    """
    spans = _Spans(trace.get_tracer_provider() if tracer_provider is None else tracer_provider)
    spans.share(pipe.from_first_rank(spans.choose))
    return pipe.register_step_hook(spans.add, every=every, actions=True)


class _Spans:
    def __init__(self, provider: TracerProvider) -> None:
        given, self._sampler = provider.get_tracer("graphpp", graphpp.__version__), getattr(provider, "sampler", None)
        self._tracer = _with_ids(given, _Ids()) or given
        self._seed, self._above, self._first = b"", INVALID_SPAN_CONTEXT, False
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def choose(self) -> bytes:
        """A seed, and the context of the current span: 16 bytes of the trace (0: none), 8 of the span, 1 of flags."""
        self._first, now = True, trace.get_current_span().get_span_context()
        return secrets.token_bytes(16) + now.trace_id.to_bytes(16) + now.span_id.to_bytes(8) + now.trace_flags.to_bytes(1)

    def share(self, chosen: bytes) -> None:
        self._seed, (above, span, flags) = chosen[:16], map(int.from_bytes, (chosen[16:32], chosen[32:40], chosen[40:]))
        self._above = SpanContext(above, span, is_remote=True, trace_flags=TraceFlags(flags))

    def add(self, step: graphpp.StepMetrics) -> None:
        """Record the spans of a step that has ended."""
        word = hashlib.sha256(self._seed + step.step.to_bytes(8)).digest()
        trace_id = self._above.trace_id if self._above.is_valid else int.from_bytes(word[:16])
        root, end = SpanContext(trace_id, int.from_bytes(word[16:24]), True, self._flags(trace_id)), step.began + step.seconds
        if self._first and (tracer := _with_ids(self._tracer, _Ids(root))) is not None:
            above = trace.set_span_in_context(NonRecordingSpan(self._above))
            attributes = {"graphpp.step": step.step, "graphpp.loss": step.loss}
            tracer.start_span("graphpp.step", above, attributes=attributes, start_time=_ns(step.began)).end(_ns(end))
        of_rank = {f"graphpp.{name}": value for name in _NUMBERS if (value := getattr(step, name)) is not None}
        of_rank["graphpp.rank"] = self._rank
        context = trace.set_span_in_context(NonRecordingSpan(root))
        span = self._tracer.start_span("graphpp.rank", context, attributes=of_rank, start_time=_ns(step.began))
        inside = trace.set_span_in_context(span)
        for event in step.actions:
            of_action = dict(_of_action(event.action))
            name, start = f"graphpp.{_NAMES.get(event.action.kind, event.action.kind.value.lower())}", _ns(event.start)
            self._tracer.start_span(name, inside, attributes=of_action, start_time=start).end(_ns(event.end))
        span.end(_ns(end))

    def _flags(self, trace_id: int) -> TraceFlags:
        """Sampled, as the parent is, else as the provider's sampler says of the trace: alike on all ranks."""
        if self._above.is_valid:
            return self._above.trace_flags
        sampled = self._sampler is None or self._sampler.should_sample(None, trace_id, "graphpp.step").decision.is_sampled()
        return TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)


def _of_action(action: Action) -> Iterator[tuple[str, str | int]]:
    yield "graphpp.action", str(action)
    if not action.parts:
        yield "graphpp.stage", action.stage
    if action.microbatch is not None:
        yield "graphpp.microbatch", action.microbatch


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _with_ids(tracer: Tracer, ids: _Ids) -> Any:
    """The SDK's tracer with another generator of ids; None for another SDK, whose ids cannot be given."""
    if not hasattr(tracer, "id_generator"):
        return None
    found: Any = copy.copy(tracer)
    found.id_generator = ids
    return found


class _Ids:
    """Generates ids for the SDK: those of one span, or random ones. The SDK's come from `random`, which ranks seed alike."""

    def __init__(self, context: SpanContext | None = None) -> None:
        self._context = context

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1 if self._context is None else self._context.trace_id

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1 if self._context is None else self._context.span_id

    def is_trace_id_random(self) -> bool:
        return True
