"""`graphpp schedule`: names and files, the checker's answers, simulations side by side."""

import json
from pathlib import Path

import pytest

import graphpp
from graphpp import schedules
from graphpp.schedules.generate.names import SCHEDULES
from tests.cli.running import document, refusal, run

FOUR = ("--ranks", "4", "--microbatches", "8")
DEADLOCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(table: graphpp.Schedule) -> list[str]:
    return [" ".join(str(cell or ".") for cell in row) for row in table.table]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_is_shown_saved_and_read_back(name: str) -> None:
    shown = run("schedule", "show", name, *FOUR, "--csv", "table.csv")
    assert shown.exit_code == 0
    assert shown.stderr == "wrote table.csv\n"
    Path("table.txt").write_text(shown.stdout)
    table = graphpp.Schedule.parse(shown.stdout)
    assert table.ranks == 4
    rows = rows_of(table)
    for file in ("table.csv", "table.txt"):
        assert document("schedule", "show", file)["table"] == rows
        assert document("schedule", "check", file)["accepted"]


def test_pictures() -> None:
    files = {"--svg": "a.svg", "--html": "a.html", "--chrome-trace": "a.json"}
    words = [word for pair in files.items() for word in pair]
    assert document("schedule", "show", "1F1B", *FOUR, *words)["written"] == list(files.values())
    table = schedules.one_f_one_b(4, 4, 8)
    assert Path("a.svg").read_text() == graphpp.svg(table)
    assert Path("a.html").read_text() == graphpp.html(table)
    assert json.loads(Path("a.json").read_text()) == json.loads(graphpp.chrome_trace(table))


def test_no_picture_is_written_of_a_table_that_cannot_run() -> None:
    Path("wrong.csv").write_text(DEADLOCK)
    assert "cannot run to its end" in refusal("schedule", "show", "wrong.csv", "--svg", "a.svg", "--csv", "b.csv")
    assert not Path("a.svg").exists()
    assert not Path("b.csv").exists()


def test_orders_of_megatron() -> None:
    orders = [schedules.table_to_order(5 - 2 * rank, 2, schedules.schedule_table(5, 2, 3)) for rank in range(2)]
    for separator, file in ((",", "orders.csv"), (" ", "orders.txt")):
        Path(file).write_text("\n".join(separator.join(map(str, order)) for order in orders))
        assert document("schedule", "show", file)["table"] == rows_of(schedules.from_orders(orders))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DEADLOCK, "deadlock, each of these waits for the next"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "0F0 stands in column 0 already"),
        ("0F0,0B0\n1F0,1B0,1F1\n", "0F1 is missing"),
        ("0F0,0X1\n", "line 1, cell 2: action '0X1'"),
        ("0F0,0B0\n1,2\n", "line 2, cell 1"),
        ("", "has no action"),
        ("1,1,-1\n", "is missing"),
    ],
)
def test_a_faulty_file_is_refused(text: str, said: str) -> None:
    Path("wrong.csv").write_text(text)
    result = run("schedule", "check", "wrong.csv")
    assert (result.exit_code, result.stderr) == (1, "")
    assert said in result.stdout
    assert "rank 0 is line 1, column 0 is cell 1" in result.stdout
    found = document("schedule", "check", "wrong.csv", code=1)
    assert not found["accepted"]
    assert said in found["message"]


def test_names_are_checked_for_the_counts() -> None:
    assert document("schedule", "check", "ForwardOnly", *FOUR)["training"] is False
    refused = run("schedule", "check", "ZBVZeroBubble", *FOUR, "--stages", "4")
    assert refused.exit_code == 1
    assert "8 stages would" in refused.stdout


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("none.csv", "none.csv cannot be read: No such file"),
        ("1F1", "did you mean 1F1B"),
        (".", "cannot be read: Is a directory"),
        ("binary.csv", "binary.csv is no text in UTF-8"),
        ("1F1B", "give --ranks and --microbatches"),
    ],
)
def test_what_is_no_schedule_is_wrong_usage(source: str, said: str) -> None:
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    for command in ("show", "check", "simulate", "compare"):
        assert said in refusal("schedule", command, source)


@pytest.mark.parametrize("counts", [("10000000", "8"), ("4096", "1000000"), ("4", "9" * 30)])
def test_huge_numbers(counts: tuple[str, str]) -> None:
    ranks, microbatches = counts
    assert "ScheduleError" in refusal("schedule", "show", "1F1B", "--ranks", ranks, "--microbatches", microbatches)


def test_unit_costs() -> None:
    found = document("schedule", "simulate", "ZBVZeroBubble", *FOUR)
    timeline = graphpp.simulate("ZBVZeroBubble", graphpp.Costs.unit(8, 4), ranks=4, microbatches=8)
    assert found["makespan"] == timeline.makespan == 25.5
    assert found["ranks_peak_bytes"] == [timeline.peak_bytes(rank) for rank in range(4)]
    assert found["bubble"] == pytest.approx(1.5 / 25.5)
    assert "a step takes 25.5 units" in run("schedule", "simulate", "ZBVZeroBubble", *FOUR).stdout


def test_costs_of_a_file() -> None:
    costs = document("schedule", "simulate", "1F1B", *FOUR)["costs"]
    costs |= {"sends_forward": [0.5] * 3, "overhead": 0.25}
    Path("costs.json").write_text(json.dumps(costs))
    found = document("schedule", "simulate", "1F1B", *FOUR, "--costs", "costs.json")
    assert found["costs"] == costs
    assert found["makespan"] > 33
    text = run("schedule", "simulate", "1F1B", *FOUR, "--costs", "costs.json").stdout
    assert " s\n" in text
    assert "3.9 KiB" in text
    assert "8 stages would" in refusal("schedule", "simulate", "ZBVZeroBubble", *FOUR, "--costs", "costs.json")
    Path("mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert "the costs are for 4 stages" in refusal("schedule", "simulate", "mine.csv", "--costs", "costs.json")
    two = ("--ranks", "2", "--microbatches", "8", "--costs", "costs.json")
    assert document("schedule", "simulate", "Interleaved1F1B", *two)["stages"] == 4
    compared = document("schedule", "compare", *two)
    assert {each["stages"] for each in compared["schedules"]} == {4}
    assert "1F1B" in compared["refused"]
    Path("costs.json").write_text(json.dumps(costs | {"overheads": 0}))
    assert "did you mean overhead?" in refusal("schedule", "show", "1F1B", *FOUR, "--costs", "costs.json")


def test_the_fastest_comes_first() -> None:
    Path("mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    found = document("schedule", "compare", "1F1B", "V-Min", "ZBVZeroBubble", "mine.csv", "--ranks", "2", "--microbatches", "1")
    times = [each["makespan"] for each in found["schedules"]]
    assert times == sorted(times)
    assert {each["name"] for each in found["schedules"]} == {"1F1B", "V-Min", "ZBVZeroBubble", "mine.csv"}
    assert found["refused"] == {}


def test_all_that_fit_are_compared() -> None:
    found = document("schedule", "compare", "--ranks", "2", "--microbatches", "5")
    names = [each["name"] for each in found["schedules"]]
    assert {*names, *found["refused"]} == set(SCHEDULES) - {"auto", "ForwardOnly"}
    assert set(found["refused"]) == {"Interleaved1F1B", "InterleavedZeroBubble"}
    assert "give --ranks and --microbatches" in refusal("schedule", "compare")
    assert "no schedule fits" in refusal("schedule", "compare", "--ranks", "2", "--stages", "3", "--microbatches", "5")
