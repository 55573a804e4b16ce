"""Every form of a user's schedule is read into the same table, or refused with a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.generate.read import ScheduleLike, default_stages, load_schedule, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule

# ------------------------------------------------------------------------------------------ build


def test_build_takes_what_a_user_has(tmp_path: Path) -> None:
    wanted = make_table("1F1B", 2, 2, 2)
    rows = [[None if cell is None else str(cell) for cell in row] for row in wanted.table]
    wanted.save(tmp_path / "own.csv")
    sources: list[Any] = [
        wanted,
        tmp_path / "own.csv",
        str(tmp_path / "own.csv"),
        rows,
        dict(enumerate(rows)),
        dict(reversed(list(enumerate(rows)))),
        [" ".join(cell or "." for cell in row) for row in rows],
        lambda ranks, stages, microbatches: dict(enumerate(rows)),
        lambda ranks, stages, microbatches: make_table("1f1b", ranks, stages, microbatches),
        {r: [cell and torch_schedules._Action.from_str(cell) for cell in row] for r, row in enumerate(rows)},
    ]
    for source in sources:
        assert make_table(source, 2, 2, 2) == wanted
        assert default_stages(source, 2) == 2
    assert make_table(wanted, 2, 2, 2) is wanted


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("1F1", "unknown schedule '1F1'; did you mean 1F1B"),
        ("Interleaved", "did you mean Interleaved1F1B"),
        ("zzz", "unknown schedule 'zzz'; Known: auto, GPipe, 1F1B, Interleaved1F1B, LoopedBFS, MegatronInterleaved"),
        ("zb-h", "unknown schedule 'zb-h'; did you mean ZB-H2 or ZB-H1"),
        ("", "unknown schedule ''"),
        ({0: ["0F0"], 2: ["1F0"]}, r"a row for each rank from 0 on, not \[0, 2\]"),
        ([["0F0", 5]], "rank 0, cell 2: action '5'"),
        ([Action(0, Kind.F, 0)], "rank 0: 0F0 stands where the list"),
        ([0, 1], "rank 0: 0 stands where the list"),
        (lambda *counts: None, "must return a Schedule.* returned None"),
        (7, "7 is no schedule"),
    ],
)
def test_build_refuses(source: Any, fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        make_table(source, 2, 2, 2)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    """Four stages on two ranks, eight microbatches."""
    make_table("Interleaved1F1B", 2, 4, 8).save(tmp_path / "own.csv")
    return tmp_path / "own.csv"


FORMS: dict[str, Callable[[Path], ScheduleLike]] = {
    "path": lambda path: path,
    "text": str,
    "table": lambda path: [list(row) for row in Schedule.load(path).table],
    "dict": lambda path: dict(enumerate(Schedule.load(path).table)),
    "schedule": Schedule.load,
    "function": lambda path: lambda ranks, stages, microbatches: Schedule.load(path),
    "function of rows": lambda path: lambda *counts: Schedule.load(path).table,
    "with communication": lambda path: add_send_recv(Schedule.load(path)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (8, 8), (3, 8), (4, 4), (4, 16), (2, 4)])
def test_a_table_for_other_counts_is_refused_with_both(form: str, stages: int, microbatches: int, csv: Path) -> None:
    built = make_table(FORMS[form](csv), 2, stages, microbatches)
    with pytest.raises(ScheduleError) as caught:
        check(built, ranks=2, stages=stages, microbatches=microbatches)
    message = str(caught.value)
    assert "is a table for 4 stages and 8 microbatches, but the pipeline runs " in message
    assert f"runs {stages} stages and {microbatches} microbatches" in message
    assert f"schedule {built.name!r}" in message


class At:
    """A user-defined path type."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return os.fspath(self.path)


def test_what_was_read_stays(csv: Path) -> None:
    """A deleted file or an exhausted iterator does not change a pipeline that was compiled from it."""
    wanted = Schedule.load(csv)
    from_file, from_rows = load_schedule(csv), load_schedule(row for row in wanted.table)
    csv.unlink()
    for known in (from_file, from_rows, from_rows):
        assert make_table(known, 2, 4, 8) == wanted


@pytest.mark.parametrize("form", [str, Path, lambda text: At(Path(text))])
@pytest.mark.parametrize("name", ["missing.csv", "no/such/folder.csv", "folder.csv"])
def test_a_file_that_cannot_be_read_is_named(name: str, form: Callable[[str], ScheduleLike], tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    path = str(tmp_path / name)
    for ask in (load_schedule, lambda source: make_table(source, 2, 4, 8), lambda source: default_stages(source, 2)):
        with pytest.raises(ScheduleError, match="cannot be read") as caught:
            ask(form(path))
        assert path in str(caught.value)
        assert not isinstance(caught.value, OSError)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("own.txt", "unknown schedule 'own.txt'; Known: auto, .*, or the path of a .csv file"),
        ("1F1", "did you mean 1F1B"),
        ("", "unknown schedule ''"),
        (None, "None is no schedule; give a name, a Schedule, a .csv path, a function or rows"),
        (b"1F1B", "rows: take a list of rows, got b'1F1B'"),
        ([["0F0", "0Z0"]], "rank 0, cell 2: action '0Z0'"),
        ({1: ["0F0"]}, "a row for each rank from 0 on"),
        ({"a": ["0F0"], 0: ["0F0"]}, "a row for each rank from 0 on"),
    ],
)
def test_what_cannot_be_read(source: Any, fault: str) -> None:
    for ask in (load_schedule, lambda source: make_table(source, 2, 2, 2), lambda source: default_stages(source, 2)):
        with pytest.raises(ScheduleError, match=fault):
            ask(source)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_default_stages_of_a_name(ranks: int) -> None:
    one = {"auto", "GPipe", "1F1B", "1f1b", "ZB1P", "ZB2P", "zb-h1", "ForwardOnly"} | (
        {"Combined1F1B"} if ranks == 1 else set()
    )
    for name in (*SCHEDULES, " loopedbfs ", "1f1b", "zb-h1"):
        assert default_stages(name, ranks) == (ranks if name in one else 2 * ranks)
        make_table(name, ranks, default_stages(name, ranks), 2 * ranks)  # it gets the counts that it asks for


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_default_stages_of_a_function_are_one_a_rank(ranks: int) -> None:
    asked: list[tuple[int, int, int]] = []

    def make(*counts: int) -> Schedule:
        asked.append(counts)  # type: ignore[arg-type]
        return Schedule.of([])

    assert default_stages(make, ranks) == ranks
    assert asked == []  # it makes a table for any number of stages, so it is not called


@pytest.mark.parametrize("maker", [lambda ranks: ["0F0 0B0"], lambda a, b, c, d: ["0F0 0B0"], lambda: None])
def test_a_function_that_cannot_take_the_counts_is_refused(maker: Any) -> None:
    with pytest.raises(ScheduleError, match=r"must take \(ranks, stages, microbatches\)"):
        make_table(maker, 1, 1, 1)
