"""The checker accepts exactly the tables that an independent, step-by-step execution runs to the end.

The oracle shares no code with the checker: the checker reasons on a graph, the oracle runs the ranks (`Machine`).
"""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import PER_STAGE, Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.mutations import MUTATIONS, accepted
from tests.schedules.tables import Machine, Rows, tables

# ------------------------------------------------------------------------------------------ the oracle


def complete(rows: Rows, stages: int, microbatches: int) -> bool:
    """True if the table has the right actions, in any order."""
    leaves = Counter(
        (rank, leaf) for rank, row in enumerate(rows) for action in row for leaf in action.leaves if leaf.kind not in PER_STAGE
    )
    home = {leaf.stage: rank for rank, leaf in leaves}
    wanted: Counter[tuple[int, Action]] = Counter()
    for stage, m in ((stage, m) for stage in range(stages) for m in range(microbatches)):
        rank = home.get(stage, -1)
        whole = (rank, Action(stage, Kind.B, m)) in leaves
        kinds = [Kind.F, Kind.B] if whole else [Kind.F, Kind.I, Kind.W]
        kinds += [Kind.R] if (rank, Action(stage, Kind.R, m)) in leaves else []
        if any(leaf.is_communication for _, leaf in leaves):
            kinds += [Kind.SEND_F, Kind.RECV_B] if home.get(stage + 1, rank) != rank else []
            kinds += [Kind.RECV_F, Kind.SEND_B] if home.get(stage - 1, rank) != rank else []
        wanted.update((rank, Action(stage, kind, m)) for kind in kinds)
    return leaves == wanted


def well_formed(action: Action) -> bool:
    if action.kind not in (Kind.OVERLAP_F_B, Kind.P2P):
        return not action.parts and (action.microbatch is None) == (action.kind in PER_STAGE)
    kinds = set(Kind) - PER_STAGE - {Kind.OVERLAP_F_B, Kind.P2P}
    compute = {Kind.F, Kind.B, Kind.I, Kind.W}
    return bool(action.parts) and {part.kind for part in action.parts} <= (
        compute if action.kind is Kind.OVERLAP_F_B else kinds - compute - {Kind.R}
    )


def whole_where_read(rows: Rows, stages: int) -> bool:
    """True if parameters are unsharded wherever they are read, UNSHARD and RESHARD alternate, and reductions come last."""
    reduced: Counter[int] = Counter()
    for stage in range(-1, 9):
        for row in rows:
            events = [leaf for action in row for leaf in action.leaves if leaf.stage == stage and not leaf.is_communication]
            letters = {Kind.UNSHARD: "U", Kind.RESHARD: "R", Kind.REDUCE_GRAD: "G", Kind.F: "f"}
            word = "".join(letters.get(leaf.kind, "b") for leaf in events)
            reduced[stage] += word.count("G")
            if word and not {"f", "b"} & set(word):  # on a rank that does not compute the stage
                return False
            plain = word.replace("G", "")
            if {"U", "R"} & set(plain) and not re.fullmatch("(U[fb]*R)*", plain):
                return False
            if "G" in word and "b" in word[word.index("G") :]:
                return False
    return all(count <= (stage in range(stages)) for stage, count in reduced.items())


def oracle(rows: Rows, stages: int, microbatches: int) -> bool:
    return (
        all(well_formed(action) for row in rows for action in row)
        and complete(rows, stages, microbatches)
        and whole_where_read(rows, stages)
        and Machine(rows, stages).runs_to_its_end()
    )


@given(tables())
@settings(deadline=None, max_examples=examples(200))
def test_legal_tables_are_accepted(table: tuple[Rows, int, int, Random]) -> None:
    rows, stages, microbatches, _ = table
    assert oracle(rows, stages, microbatches)
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    check(schedule, ranks=len(rows), stages=stages, microbatches=microbatches)


NEARLY_ALWAYS_RIGHT = {"split a backward", "turn a batch", "take a batch apart"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_refused_unless_still_right(name: str) -> None:
    outcomes: Counter[bool] = Counter()

    @given(tables())
    @settings(deadline=None, max_examples=examples(60), database=None, derandomize=True)
    def run(table: tuple[Rows, int, int, Random]) -> None:
        rows, stages, microbatches, random = table
        MUTATIONS[name](random, rows)
        verdict = oracle(rows, stages, microbatches)
        assert accepted(rows, stages, microbatches) == verdict
        outcomes[verdict] += 1

    run()
    assert outcomes[name in NEARLY_ALWAYS_RIGHT] > 0


def refusal(text: str, ranks: int = 2, stages: int = 2, microbatches: int = 2) -> str:
    schedule = Schedule.of(text.split("\n"), name="mine.csv", stages=stages, microbatches=microbatches)
    with pytest.raises(ScheduleError) as caught:
        check(schedule, ranks=ranks, stages=stages, microbatches=microbatches)
    assert "mine.csv" in str(caught.value)
    return str(caught.value)


GOOD_0, GOOD_1 = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"

TORCH_ACCEPTS = {
    "doubled F": (f"0F0 0F0 0F1 0B0 0B1\n{GOOD_1}", "rank 0, column 1: 0F0 stands in column 0 already; remove one"),
    "doubled B": (f"0F0 0F1 0B0 0B1 0B1\n{GOOD_1}", "rank 0, column 4: 0B1 stands in column 3 already"),
    "microbatch 7": (f"0F0 0F1 0F7 0B0 0B1\n{GOOD_1}", "rank 0, column 2: 0F7: there is no microbatch 7"),
    "B beside W": (f"0F0 0F1 0B0 0W0 0B1\n{GOOD_1}", "rank 0, column 3: 0W0 beside 0B0"),
    "B beside I and W": (f"0F0 0F1 0B0 0I0 0W0 0B1\n{GOOD_1}", "rank 0, column 3: 0I0 beside 0B0"),
    "R before F": (f"0R0 0F0 0F1 0B0 0B1\n{GOOD_1}", "rank 0, column 0: 0R0 needs 0F0, which stands in column 1; move 0F0"),
    "R after B": (f"0F0 0F1 0B0 0R0 0B1\n{GOOD_1}", "rank 0, column 2: 0B0 needs 0R0, which stands in column 3; move 0R0"),
    "R after I": (f"0F0 0F1 0I0 0R0 0W0 0B1\n{GOOD_1}", "rank 0, column 2: 0I0 needs 0R0, which stands in column 3"),
    "doubled R": (f"0F0 0F1 0R0 0R0 0B0 0B1\n{GOOD_1}", "rank 0, column 3: 0R0 stands in column 2 already"),
    "R alone": (f"0F0 0F1 0R0 0B1\n{GOOD_1}", "0B0 is missing from this rank; add 0B0 (or I and W)"),
    "deadlock": ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "rank 0, column 1: deadlock"),
    "missing receive": (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        "rank 1, column 4: 1RECV_F1 is missing from this rank, so 1F1 would run on nothing; add 1RECV_F1 before 1F1",
    ),
}


@pytest.mark.parametrize("case", TORCH_ACCEPTS)
def test_files_that_torch_wrongly_accepts(case: str) -> None:
    text, message = TORCH_ACCEPTS[case]
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"0F0 0F1 0B0\n{GOOD_1}", "rank 0, column 1: 0B1 is missing from this rank; add 0B1 (or I and W)"),
        (f"0F1 0B1\n{GOOD_1}", "rank 0, column 0: 0F0 is missing"),
        (f"0F0 0F1 0I0 0B1\n{GOOD_1}", "0W0 is missing"),
        (f"0F0 0F1 0W0 0B1\n{GOOD_1}", "0I0 is missing"),
        (f"0F0 0B1 0F1 0B0\n{GOOD_1}", "rank 0, column 1: 0B1 needs 0F1, which stands in column 2; move 0F1 before"),
        (f"0F0 0F1 0W0 0I0 0B1\n{GOOD_1}", "0W0 needs 0I0"),
        (f"0F0 0F1 0B0 0REDUCE_GRAD 0B1\n{GOOD_1}", "0REDUCE_GRAD needs 0B1"),
        (f"0F0 0F1 0B0 0B1 0REDUCE_GRAD 0REDUCE_GRAD\n{GOOD_1}", "0REDUCE_GRAD stands in column 4 already"),
        (f"{GOOD_0} 5F0\n{GOOD_1}", "rank 0, column 4: 5F0: there is no stage 5; stages are 0..1"),
        ("0F0 0F1 0B0 1B0 0B1\n1F0 1F1 1B1", "rank 1, column 0: 1F0: stage 1 has actions on rank 0 too"),
        ("\n", "stage 0 of 2 stands on no rank; add its actions to the row of the rank that holds it"),
        (f"{GOOD_0} 0SEND_F0\n{GOOD_1}", "rank 1, column 0: 1RECV_F0 is missing from this rank, so 1F0 would run on"),
        (f"{GOOD_0}\n1RECV_F0 {GOOD_1}", "rank 0, column 0: 0SEND_F0 is missing from this rank, so the result of"),
    ],
)  # fmt: skip
def test_refusals(text: str, message: str) -> None:
    assert message in refusal(text)


def test_a_deadlock_shows_the_cycle() -> None:
    message = refusal("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    cycle = [line.strip() for line in message.splitlines()[1:-1]]
    assert cycle == [
        "0B0 (rank 0, column 1) waits for 1B0 (rank 1, column 2)",
        "1B0 (rank 1, column 2) comes after 1F1 (rank 1, column 1)",
        "1F1 (rank 1, column 1) waits for 0F1 (rank 0, column 2)",
        "0F1 (rank 0, column 2) comes after 0B0 (rank 0, column 1)",
    ]


def test_sends_that_cross_need_a_buffer_and_are_refused() -> None:
    """Both ranks send first and receive afterwards: gloo would buffer the sends, NCCL would hang."""
    message = refusal(
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    assert "deadlock" in message
    assert "a message is over when both of its ends have come to it" in message
    assert "1SEND_B0 (rank 1, column 4) -> 0RECV_B0 (rank 0, column 3)" in message
    assert "0SEND_F1 (rank 0, column 4) -> 1RECV_F1 (rank 1, column 3)" in message


def test_each_end_of_a_message_stands_on_its_side_of_the_computation() -> None:
    good_0, good_1 = "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"
    for text, fault in [
        (f"{good_0}\n1F0 1RECV_F0 1B0 1SEND_B0", "column 0: 1F0 needs 1RECV_F0, which stands in column 1"),
        (f"0F0 0SEND_F0 0B0 0RECV_B0\n{good_1}", "column 2: 0B0 needs 0RECV_B0, which stands in column 3"),
        (f"0SEND_F0 0F0 0RECV_B0 0B0\n{good_1}", "column 0: 0SEND_F0 needs 0F0, which stands in column 1"),
    ]:
        assert fault in refusal(text, microbatches=1)


def test_a_channel_has_one_order_at_both_ends() -> None:
    message = refusal(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    assert "rank 1, column 0: 1RECV_F1 stands before 1RECV_F0 (column 1)" in message
    assert "rank 0 sends 0SEND_F0 before 0SEND_F1 to rank 1" in message


def test_a_send_to_the_own_rank_is_left_over() -> None:
    rows = "0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"
    assert "0SEND_F0 has no stage on another rank at its other end" in refusal(rows, ranks=1, microbatches=1)


@pytest.mark.parametrize("with_communication", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (3, 4), (4, 4), (2, 1), (2, 3), (2, 5), (4, 2)])
def test_a_whole_table_for_other_counts_is_refused_as_a_whole(
    stages: int, microbatches: int, with_communication: bool
) -> None:
    schedule = make_table("1F1B", 2, 2, 4)
    schedule = add_send_recv(schedule) if with_communication else schedule
    with pytest.raises(ScheduleError) as caught:
        check(schedule, ranks=2, stages=stages, microbatches=microbatches)
    assert str(caught.value) == (
        "schedule '1F1B' is a table for 2 stages and 4 microbatches, but the pipeline runs "
        f"{stages} stages and {microbatches} microbatches; write a table for these, or "
        "split the model into 2 stages and its batch into 4 microbatches"
    )


@pytest.mark.parametrize(
    ("text", "stages", "microbatches", "message"),
    [
        ("0F0 0B0\n2F0 2B0", 3, 1, "stage 1 of 3 stands on no rank"),  # incomplete for two stages too
        (f"{GOOD_0} 0F7 0B7\n{GOOD_1}", 2, 2, "rank 0, column 4: 0F7: there is no microbatch 7"),
        (f"0F0 0F1 0B0 0B1\n{GOOD_1} 1F2 1B2", 2, 3, "0F2 is missing from this rank"),
    ],
)
def test_a_table_that_is_whole_for_no_counts_shows_the_place(
    text: str, stages: int, microbatches: int, message: str
) -> None:
    assert message in refusal(text, stages=stages, microbatches=microbatches)


def test_ranks_and_counts_are_the_callers() -> None:
    schedule = make_table("1F1B", 2, 2, 4)
    with pytest.raises(ScheduleError, match="rows for 2 ranks, but 3 run it"):
        check(schedule, ranks=3, stages=2, microbatches=4)
    renumbered = Schedule(schedule.table, stages=3, microbatches=4)
    with pytest.raises(ScheduleError, match="says it has 3 stages and 4 microbatches, but its table has 2 and 4"):
        check(renumbered, ranks=2, stages=2, microbatches=4)


@pytest.mark.parametrize(
    "action",
    [
        Action(0, Kind.F),
        Action(0, Kind.F, -1),
        Action(0, Kind.UNSHARD, 0),
        Action(-1, Kind.OVERLAP_F_B),
        Action(0, Kind.F, 0, (Action(0, Kind.F, 0),)),
        Action(-1, Kind.OVERLAP_F_B, None, (Action(0, Kind.SEND_F, 0), Action(0, Kind.B, 0))),
    ],
)
def test_actions_that_no_text_could_make(action: Action) -> None:
    schedule = Schedule(((action, Action(0, Kind.B, 0)),), stages=1, microbatches=1)
    with pytest.raises(ScheduleError, match="rank 0, column 0"):
        check(schedule, ranks=1, stages=1, microbatches=1)


def test_parts_of_an_overlap_need_nothing_of_each_other() -> None:
    """A part may not depend on another part, not even by way of another rank: an overlap waits for all its inputs."""
    check(Schedule.of(["0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]), ranks=2, stages=2, microbatches=3)
    message = refusal("(0F0;0B0)OVERLAP_F_B 0F1 0B1\n1F0 1B0 1F1 1B1")
    assert "0B0 needs 0F0, which stands in column 0" in message
    message = refusal("(0F0;2F0)OVERLAP_F_B 2B0 0B0\n1F0 1B0", stages=3, microbatches=1)
    assert "(0F0;2F0)OVERLAP_F_B (rank 0, column 0) waits for 1F0 (rank 1, column 0)" in message
    assert "1F0 (rank 1, column 0) waits for (0F0;2F0)OVERLAP_F_B (rank 0, column 0)" in message


def test_forwards_only() -> None:
    training = add_send_recv(make_table("1F1B", 2, 2, 2))
    forwards = training.forward_only()
    for table in (forwards, Schedule.of(["0F0 0F1", "1F0 1F1"]), Schedule.of(["0UNSHARD 0F0 0F1 0RESHARD", "1F0 1F1"])):
        check(table, ranks=2, stages=2, microbatches=2, training=False)
        with pytest.raises(ScheduleError, match="0B0 is missing"):
            check(table, ranks=2, stages=2, microbatches=2)
    for table, fault in [
        (training, r"rank 0, column 4: 0RECV_B0 has no place in a table of forwards; .* Schedule.forward_only\(\)"),
        (make_table("1F1B", 2, 2, 2), "0B0 has no place"),
        (Schedule.of(["0F0 0F1 0REDUCE_GRAD", "1F0 1F1"]), "0REDUCE_GRAD has no place"),
        (Schedule.of(["0F0 0F1", "1F0"]), "1F1 is missing"),
        (Schedule.of(["0F0 0F1", "1F0 1F1 1F1"]), "1F1 stands in column 1 already"),
    ]:
        with pytest.raises(ScheduleError, match=fault):
            check(table, ranks=2, stages=2, microbatches=2, training=False)


def test_a_batch_is_over_as_a_whole() -> None:
    """A reader waits for all messages of a batch: here 0B0 waits for a message that needs 0B0 to have run."""
    rows = "0F0 0SEND_F0 0F1 {} 0B0 {}\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    check(
        Schedule.of(rows.format("(0SEND_F1;0RECV_B0)P2P", "0RECV_B1 0B1").split("\n")), ranks=2, stages=2, microbatches=2
    )
    message = refusal(rows.format("0SEND_F1 (0RECV_B0;0RECV_B1)P2P", "0B1").replace("1RECV_F1 1F1", "1F1"))
    assert "1RECV_F1 is missing" in message
    late = "0F0 0SEND_F0 0F1 (0RECV_B0;0RECV_B1)P2P 0B0 0SEND_F1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    message = refusal(late)
    assert "0B0 (rank 0, column 4) waits for 1SEND_B1 (rank 1, column 7) -> 0RECV_B1 (rank 0, column 3 of a batch)" in message


def test_messages_of_a_batch_keep_the_order_of_their_channel() -> None:
    rows = (
        "0F0 0F1 (0SEND_F{};0SEND_F{})P2P 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "(1RECV_F0;1RECV_F1)P2P 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    check(Schedule.of(rows.format(0, 1).split("\n")), ranks=2, stages=2, microbatches=2)
    assert "1RECV_F0 stands before 1RECV_F1 (column 0), but rank 0 sends 0SEND_F1 before 0SEND_F0" in refusal(rows.format(1, 0))
