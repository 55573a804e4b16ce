"""Spans of steps: one trace for all ranks, under the caller's span, as the provider samples."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from graphpp.integrations.opentelemetry import trace_steps
from tests.distributed import run_ranks
from tests.pipeline.test_step_metrics import X, Y, made

Span = tuple[str, int, int, int | None, dict[str, object], tuple[int, int]]  # name, trace, span, parent, attributes, times


def plain(span: ReadableSpan) -> Span:
    parent = None if span.parent is None else span.parent.span_id
    times = span.start_time or 0, span.end_time or 0
    return span.name, span.context.trace_id, span.context.span_id, parent, dict(span.attributes or {}), times


def traced(rank: int, inside: bool, sampled: bool) -> list[Span]:
    """The spans of steps 2 and 4; with `inside` during a span of each rank."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider() if sampled else TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    own, pipe = provider.get_tracer("own").start_span("epoch") if inside else trace.INVALID_SPAN, made()
    with trace.use_span(own, end_on_exit=True), trace_steps(pipe, every=2, tracer_provider=provider):
        for _ in range(4):
            pipe.step(X, target=Y)
    return [plain(span) for span in exporter.get_finished_spans()]


def test_a_step_is_one_trace_with_a_span_of_each_rank_and_action() -> None:
    first, second = run_ranks(traced, 2, False, True)
    roots = [span for span in first + second if span[0] == "graphpp.step"]
    assert [root[4]["graphpp.step"] for root in roots] == [2, 4] and all(root[3] is None for root in roots)
    assert len({root[1] for root in roots}) == 2, "a trace for each step"
    for _, of_trace, id_of_step, *_ in roots:
        spans = [span for span in first + second if span[1] == of_trace]
        ranks = [span for span in spans if span[0] == "graphpp.rank"]
        assert [span[4]["graphpp.rank"] for span in ranks] == [0, 1] and {span[3] for span in ranks} == {id_of_step}
        for number, (_, _, above, _, _, (start, end)) in enumerate(ranks):
            inside = [span for span in spans if span[3] == above]
            names = {span[4]["graphpp.action"]: span[0] for span in inside}
            assert names[f"{number}F3"] == "graphpp.forward" and names[f"{number}B3"] == "graphpp.backward"
            assert names["1RECV_F0" if number else "0SEND_F0"] in ("graphpp.recv_f", "graphpp.send_f")
            assert all(start <= span[5][0] <= span[5][1] <= end + 100_000 for span in inside)
    assert len(first + second) == len({span[2] for span in first + second}), "no id twice"


@pytest.mark.parametrize("sampled", [True, False])
def test_steps_are_in_the_trace_of_the_first_ranks_span_if_that_is_sampled(sampled: bool) -> None:
    first, second = run_ranks(traced, 2, True, sampled)
    if not sampled:
        assert first == second == []
        return
    (epoch,) = (span for span in first if span[0] == "epoch")
    steps = [span for span in first + second if span[0].startswith("graphpp.")]
    assert {span[1] for span in steps} == {epoch[1]} and len(steps) > 60
    assert [span[3] for span in steps if span[0] == "graphpp.step"] == [epoch[2]] * 2


def test_a_sampler_that_drops_a_step_drops_it_on_all_ranks() -> None:
    assert run_ranks(traced, 2, False, False) == [[], []]
