"""The schedules that the search finds, against stored optima and lower bounds (`optima.json`)."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.check.step_memory import peak_bytes
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.search.arguments import one_by_one
from graphpp.schedules.search.candidate import peaks
from graphpp.schedules.search.evaluate import evaluate_order, evaluate_rows
from graphpp.schedules.search.evaluate_sequence import evaluate_sequence, sequences
from graphpp.schedules.search.fill_waits import fill_waits
from graphpp.schedules.search.local_search import local_search
from graphpp.schedules.search.move_elements import Moves, save_bytes
from graphpp.schedules.search.problem import Problem, with_messages
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.search.sequence import Elements
from graphpp.schedules.search.start_patterns import start_patterns
from graphpp.schedules.search.tables import Tables, apart, candidate_of, numbered, rows_of, schedule_of
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import BACKWARDS, Kind
from graphpp.schedules.table.costs import Costs
from tests.exhaustive import examples, further
from tests.schedules.search.cases import CASES, Case, known

KNOWN = known()


def named(case: Case) -> list[float]:
    """The makespans of the named schedules with the case's placement that fit its caps."""
    ends = []
    for generator in SCHEDULES.values():
        try:
            table = generator(case.ranks, len(case.costs.stages), case.microbatches)
        except ScheduleError:
            continue
        fits = all(peak <= cap for peak, cap in zip(peak_bytes(table, case.costs), case.caps, strict=True))
        if fits and table.rank_of_stage == case.home and not table.kinds.isdisjoint(BACKWARDS):
            ends.append(simulate(table, case.costs).makespan)
    return ends


_HARD = (
    "uneven 2x3 loop2 cap 1.4",
    "forms 2x5 loop2 cap 1",
    "unit 4x6 loop2 cap 2",
    "overlap 2x4 v2 cap 1.9",
    "blocking 3x4 loop2 cap inf",
    "blocking 3x4 loop1 cap inf",
)
"""Cases that earlier forms of the search missed by more than 2 %."""
_SEARCHED = [each for at, each in enumerate(CASES) if at % 52 == 0 or each.name in _HARD[:2]]
_FURTHER = [each for at, each in enumerate(CASES) if at % 52 in (13, 26, 39) or each.name in _HARD[2:]]


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("case", [*_SEARCHED, *further(*_FURTHER)], ids=lambda case: case.name)
def test_within_two_percent_of_the_best_known_table(case: Case) -> None:
    table = case.search()
    timeline = simulate(table, case.costs)
    check(table, ranks=case.ranks, stages=len(case.costs.stages), microbatches=case.microbatches)
    assert all(timeline.peak_bytes(rank) <= cap for rank, cap in enumerate(case.caps))
    assert timeline.makespan >= KNOWN[case.name].bound - 1e-6
    assert timeline.makespan <= 1.02 * KNOWN[case.name].makespan
    assert timeline.makespan <= min([inf, *named(case)]) * (1 + 1e-9)


def test_every_case_has_a_stored_result() -> None:
    assert set(KNOWN) <= {case.name for case in CASES}
    assert len(KNOWN) >= 0.97 * len(CASES)
    assert all(each.bound <= each.makespan for each in KNOWN.values())
    assert sum(each.bound == each.makespan for each in KNOWN.values()) > 0.7 * len(CASES)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("ranks", "stages", "placement"), [(2, 4, "v"), (1, 2, "loop"), *further((3, 6, "v"), (2, 4, "loop"))])
def test_overlaps_beat_dualpipev_and_combined_1f1b(ranks: int, stages: int, placement: str) -> None:
    costs = replace(Costs.unit(stages, ranks, send=0.05), overlap=0.75)
    table = schedule_auto(costs, ranks=ranks, microbatches=2 * stages, placement=placement, effort=0.3)
    check(table, ranks=ranks, stages=stages, microbatches=2 * stages)
    assert any(action.kind is Kind.OVERLAP_F_B for _, _, action in table.cells())
    rival = SCHEDULES["DualPipeV" if placement == "v" else "Combined1F1B"](ranks, stages, 2 * stages)
    end = simulate(table, costs).makespan
    assert end <= simulate(rival, costs).makespan * (1 + 1e-9)
    apart = schedule_auto(replace(costs, overlap=1.0), ranks=ranks, microbatches=2 * stages, placement=placement, effort=0.3)
    assert end < 0.97 * simulate(apart, costs).makespan


@settings(max_examples=examples(12), deadline=None)
@given(st.sampled_from([case for case in CASES if not case.costs.blocking]), st.integers(0, 10**6))
def test_the_times_of_rows_are_the_simulators(case: Case, seed: int) -> None:
    random = Random(seed)
    costs = replace(case.costs, overhead=random.choice((0.0, 7.0)))
    problem = Problem.of(costs, case.home, case.microbatches, case.caps)
    whole = bytearray(problem.prefers_whole(x // problem.microbatches) for x in range(problem.count))
    for start in list(start_patterns(problem, whole, random))[:8:4]:
        found = evaluate_order(problem, fill_waits(problem, start, 4))
        if found is None:
            continue
        [placed] = sequences(Elements.of(problem), found.candidate, found.rows)
        assert placed.solution.rows == found.rows
        moved = local_search(placed, 40, Moves(placed.elements, random)).solution
        assert moved.makespan <= found.makespan + 1e-9
        table = schedule_of(problem, numbered(moved, join=False), "moved")
        check(table, ranks=case.ranks, stages=problem.stages, microbatches=case.microbatches)
        timeline = simulate(table, costs)
        assert timeline.makespan == pytest.approx(moved.makespan * problem.unit)
        assert all(timeline.peak_bytes(rank) <= cap for rank, cap in enumerate(case.caps))
        again = evaluate_rows(problem, *rows_of(problem, table)[:2])
        assert again is not None
        assert again.makespan == pytest.approx(moved.makespan)
        if problem.pairs:
            assert candidate_of(problem, rows_of(problem, table)).beside == rows_of(problem, table).candidate.beside


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([case for case in CASES if case.microbatches < 8]), st.integers(0, 10**6))
def test_the_times_of_sequences_with_messages_are_the_simulators(case: Case, seed: int) -> None:
    random = Random(seed)
    costs = replace(case.costs, blocking=True, overhead=random.choice((0.0, 7.0)))
    problem = Problem.of(costs, case.home, case.microbatches, case.caps)
    elements = Elements.of(with_messages(problem, costs))
    whole = bytearray(problem.prefers_whole(x // problem.microbatches) for x in range(problem.count))
    found = next(filter(None, (evaluate_order(problem, each) for each in start_patterns(problem, whole, random))), None)
    assume(found is not None)  # under a tight cap no pattern may fit
    assert found is not None
    for placed in sequences(elements, found.candidate, found.rows):
        moved = local_search(placed, 60, Moves(elements, random))
        assert moved.end <= placed.end
        table = schedule_of(elements.problem, numbered(moved.solution, join=False), "moved")
        check(table, ranks=case.ranks, stages=problem.stages, microbatches=case.microbatches)
        timeline = simulate(table, costs)
        assert timeline.makespan == pytest.approx(moved.end[0])
        assert all(timeline.peak_bytes(rank) <= cap for rank, cap in enumerate(case.caps))


@settings(max_examples=examples(12), deadline=None)
@given(st.sampled_from([case for case in CASES if case.microbatches < 8 and case.costs.overlap == 1]), st.integers(0, 10**6))
def test_a_sequence_takes_the_time_of_its_rows(case: Case, seed: int) -> None:
    random = Random(seed)
    problem = Problem.of(case.costs, case.home, case.microbatches, case.caps)
    elements = Elements.of(with_messages(problem, case.costs) if case.costs.blocking else problem)
    start = rows_of(problem, one_by_one(case.costs, case.home, case.ranks, case.microbatches))
    current = next(sequences(elements, start.candidate, start.rows))
    for _ in range(30):
        candidate, sequence = Moves(elements, random).neighbour(current) or (current.candidate, current.sequence)
        limit = random.choice((inf, current.total + 1e-9))
        found = evaluate_sequence(elements, candidate, sequence, limit)
        rows = evaluate_rows(elements.problem, candidate, elements.rows(sequence), limit)
        assert (found is None) == (rows is None)
        if found and rows:
            assert (found.makespan, found.total) == pytest.approx((rows.makespan, rows.total))
            assert found.ends[:-1] == pytest.approx([max(each, 0.0) for each in rows.ends[:-1]])
            current = found


@pytest.mark.parametrize("name", ["uneven 3x3 loop1", "overlap 2x4 loop1", "blocking 2x4 loop1"])
def test_bytes_are_saved_at_no_cost_of_time(name: str) -> None:
    case = next(each for each in CASES if each.name == f"{name} cap inf")
    problem = Problem.of(case.costs, case.home, case.microbatches, case.caps)
    elements = Elements.of(with_messages(problem, case.costs) if case.costs.blocking else problem)
    generator = SCHEDULES["GPipe" if case.ranks == len(case.costs.stages) else "DualPipeV"]
    start = rows_of(problem, generator(case.ranks, len(case.costs.stages), case.microbatches))
    placed = next(sequences(elements, apart(problem, start.candidate), start.rows))
    saved = save_bytes(placed, 400, Random(0))
    assert saved.makespan <= placed.makespan * (1 + 1e-9)
    before, after = (sum(peaks(elements.problem, each.candidate, each.solution.rows)) for each in (placed, saved))
    assert after < 0.9 * before


@pytest.mark.parametrize(("ranks", "stages"), [(3, 3), (2, 4), (3, 6)])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_named_table_takes_what_the_simulator_says(ranks: int, stages: int, blocking: bool) -> None:
    """With its messages, where these occupy ranks, and with its pairs."""
    costs = replace(Costs.unit(stages, ranks, send=0.1), overlap=0.9, overhead=0.05, blocking=blocking)
    exchanged = [{Kind.F: at % 2 * each.forward / 2, Kind.I: each.input_grad / 3} for at, each in enumerate(costs.stages)]
    costs = replace(costs, stages=tuple(map(lambda each, own: replace(each, exchanged=own), costs.stages, exchanged)))
    for generator in SCHEDULES.values():
        try:
            table = generator(ranks, stages, 6)
        except ScheduleError:
            continue
        if table.kinds.isdisjoint(BACKWARDS):
            continue
        home = table.rank_of_stage
        for cap in (2000.0, inf):
            tables = Tables(costs, [home], 6, [cap] * ranks)
            end = tables.end(tables.complete(rows_of(Problem.of(costs, home, 6, [cap] * ranks), table)))
            fits = max(peak_bytes(table, costs)) <= cap
            assert end == (pytest.approx(simulate(table, costs).makespan) if fits else inf)
