"""A schedule prints, parses, saves and loads unchanged, and gives the table of an evaluation."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.pipelining import schedules as torch_schedules

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import Machine, Rows, named, rows_of, tables

# ------------------------------------------------------------------------------------------ text and CSV


@given(named())
@settings(deadline=None, max_examples=examples(50))
def test_text_and_csv_bring_it_back(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    path = tmp_path_factory.mktemp("csv") / "schedule.csv"
    for one in (schedule, add_send_recv(schedule)):
        again = Schedule.parse(str(one))
        assert again == one
        assert again.name == one.name
        one.save(path)
        assert Schedule.load(path) == one
        assert hash(Schedule.load(path)) == hash(one)


def test_torch_reads_our_csv_and_we_read_its(tmp_path: Path) -> None:
    ours = add_send_recv(make_table("Interleaved1F1B", 2, 4, 4))
    ours.save(tmp_path / "ours.csv")
    runtime: Any = torch_schedules._PipelineScheduleRuntime
    reader = SimpleNamespace()
    reader._prepare_schedule_with_comms = lambda actions, format: setattr(reader, "read", actions)
    runtime._load_csv(reader, str(tmp_path / "ours.csv"), "compute_comms")
    assert [[str(cell) for cell in reader.read[rank]] for rank in range(2)] == [
        [str(cell) for cell in row] for row in ours.table
    ]
    writer = SimpleNamespace(pipeline_order_with_comms=reader.read)
    runtime._dump_csv(writer, str(tmp_path / "theirs.csv"))
    assert Schedule.load(tmp_path / "theirs.csv") == ours


def test_awkward_tables_come_back(tmp_path: Path) -> None:
    """Idle ends, a rank that only idles, an empty row, an idle stage, an overlap, a name with blanks."""
    rows = ["0F0 . (0F1;0B0)OVERLAP_F_B .", [None], [], ". . 2UNSHARD 2F0"]
    schedule = Schedule.of(rows, name="my: own\n table", stages=5, microbatches=3)
    assert schedule.rank_of_stage == {0: 0, 2: 3}
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(str(schedule)).name == "my: own table"
    schedule.save(tmp_path / "t.csv")
    assert Schedule.load(tmp_path / "t.csv") != schedule
    assert (Schedule.load(tmp_path / "t.csv").stages, Schedule.load(tmp_path / "t.csv").microbatches) == (3, 2)
    assert Schedule.of([]).ranks == Schedule.of([]).stages == Schedule.of([]).microbatches == 0
    assert Schedule.parse(str(Schedule.of([]))) == Schedule.of([])


@pytest.mark.parametrize(
    ("text", "place", "fault"),
    [
        (b"0F0,0B0\n1F0,1B\n", "line 2, cell 2", "'1B', column 3: B needs a microbatch"),
        (b"0F0,0B0x\n1F0,1B0\n", "line 1, cell 2", "'0B0x', column 4: 'x' is left over"),
        (b"0F0;0B0\n", "line 1, cell 1", "';0B0' is left over"),
        (b"\n\n,0F0,0Q0\n", "line 3, cell 3", "'Q' is no kind"),
        (b"0F0,\"0B0\n1F0,1B0\n", "line 1", "is no line of CSV"),
        (b"0F0,\xff\n", "", "cannot be read"),
    ],
)  # fmt: skip
def test_csv_faults_name_file_line_and_cell(tmp_path: Path, text: bytes, place: str, fault: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text)
    with pytest.raises(ScheduleError) as caught:
        make_table(str(path), 2, 2, 1)
    message = str(caught.value)
    assert str(path) in message
    assert place in message
    assert fault in message


def test_csv_from_other_hands(tmp_path: Path) -> None:
    """A byte order mark, CR LF, blanks after commas, quotes, and the WAIT cells that torch 2.15 writes."""
    path = tmp_path / "s.CSV"
    path.write_bytes(b'\xef\xbb\xbf0F0, "0SEND_F0",0WAIT_SEND_F0 ,0B0,0WAIT_REDUCE_GRAD\r\n'.replace(b', "', b',"'))
    assert Schedule.load(path) == Schedule.of([["0F0", "0SEND_F0", None, "0B0", None]])
    assert make_table(str(path), 1, 1, 1).name == str(path)
    with pytest.raises(ScheduleError, match=r"missing\.csv cannot be read"):
        make_table(tmp_path / "missing.csv", 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("r0 0F0\nr2 1F0", "line 2: starts with 'r2' where 'r1' should stand"),
        ("GPipe\nr0 0F0", "line 1: starts with 'GPipe' where 'r0' should stand"),
        ("x: 1 stages, 1 microbatches\n\nr0 0F0 0Z0", "line 3, cell 2: action '0Z0', column 2"),
    ],
)
def test_text_faults_name_line_and_cell(text: str, fault: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert fault in str(caught.value)


def test_what_is_recomputed_is_read_strictly_and_its_faults_have_a_place(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0F0,0B0\n\nrecompute 0: x\n")
    with pytest.raises(ScheduleError, match=r"s\.csv, line 3: 'recompute 0: x': write"):
        Schedule.load(path)
    with pytest.raises(ScheduleError, match="schedule text, line 2: 'recompute 0'"):
        Schedule.parse("r0 0F0 0B0\nrecompute 0")
    with pytest.raises(ScheduleError, match="recomputes stage 0 at microbatch 3, but has 1 stages and 1 microbatches"):
        check(Schedule.parse("r0 0F0 0B0\nrecompute 0: 0 3"), ranks=1, stages=1, microbatches=1)


def test_what_is_recomputed_may_be_any_collection_of_pairs() -> None:
    table = Schedule.of(["0F0 0F1 0B0 0B1"])
    for pairs in ({(0, 1)}, [(0, 1), (0, 1)], ([0, 1],)):
        made = replace(table, recomputed=pairs)  # type: ignore[arg-type]
        assert made == replace(table, recomputed=frozenset({(0, 1)}))
        assert hash(made) is not None
        assert Schedule.parse(str(made)) == made
    for wrong in ("full", True, {1}, {(0, "1")}, {(0, -1)}):
        with pytest.raises(ScheduleError, match=r"recomputed=.*give pairs"):
            replace(table, recomputed=wrong)  # type: ignore[arg-type]


def evaluated(schedule: Schedule) -> Schedule:
    """The table that an evaluation runs, after checking that every forward runs once, in its old place, and none hangs."""
    forwards = schedule.forward_only()
    assert (forwards.stages, forwards.microbatches, forwards.name) == (
        schedule.stages,
        schedule.microbatches,
        schedule.name,
    )
    runs = forwards if forwards.has_communication else add_send_recv(forwards)
    assert Machine(rows_of(runs), runs.stages).runs_to_its_end()
    assert [only(row, Kind.F) for row in rows_of(runs)] == [only(row, Kind.F) for row in rows_of(schedule)]
    done = sorted(action for row in rows_of(runs) for action in row if action.kind is Kind.F)
    assert done == [Action(*pair) for pair in product(range(runs.stages), [Kind.F], range(runs.microbatches))]
    kinds = {leaf.kind for row in rows_of(runs) for action in row for leaf in action.leaves}
    assert kinds <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert runs.rank_of_stage == schedule.rank_of_stage
    return runs


def only(row: list[Action], *kinds: Kind) -> list[Action]:
    return [leaf for action in row for leaf in action.leaves if leaf.kind in kinds]


@given(named())
@settings(deadline=None, max_examples=examples(100))
def test_forwards_of_a_named_schedule(schedule: Schedule) -> None:
    """Adding messages first or taking the forwards first gives the same messages in the same order on each rank."""
    before, after = evaluated(schedule), evaluated(add_send_recv(schedule))
    kinds = (Kind.F, Kind.SEND_F)
    assert [only(row, *kinds) for row in rows_of(before)] == [only(row, *kinds) for row in rows_of(after)]
    assert [sorted(row) for row in rows_of(before)] == [sorted(row) for row in rows_of(after)]


@given(tables())
@settings(deadline=None, max_examples=examples(150))
def test_forwards_of_any_legal_table(table: tuple[Rows, int, int, Random]) -> None:
    """Any stage on any rank, any order, with and without communication."""
    rows, stages, microbatches, _ = table
    evaluated(Schedule.of(rows, stages=stages, microbatches=microbatches))


def test_forwards_only_is_the_same_table_without_the_rest() -> None:
    table = Schedule.of(["0UNSHARD 0F0 (0F1;0B0)OVERLAP_F_B . 0I1 0W1", "1F0 1B0 1F1 1B1"], name="mine")
    assert str(table.forward_only()) == "mine: 2 stages, 2 microbatches\nr0 0F0 0F1\nr1 1F0 1F1"
    assert str(add_send_recv(table).forward_only()) == (
        "mine: 2 stages, 2 microbatches\nr0 0F0      0SEND_F0 0F1      0SEND_F1\nr1 1RECV_F0 1F0      1RECV_F1 1F1"
    )
    assert table.forward_only().forward_only() == table.forward_only()


def test_a_schedule_can_be_pickled_whatever_was_asked_of_it() -> None:
    schedule = Schedule.parse("mine: 2 stages, 2 microbatches\nr0 0F0 . 0F1\nr1 1F0 1F1\nrecompute 0: 1")
    assert schedule.rank_of_stage[1] == 1
    assert not schedule.has_communication
    again = pickle.loads(pickle.dumps(schedule))
    assert (again, again.name) == (schedule, "mine")
