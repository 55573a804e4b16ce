"""Costs as JSON: what `asdict` writes is read back equal, everything else is refused by name."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpp.cli.simulated import read_costs
from graphpp.errors import GraphPPError
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts

TIMES = st.floats(0, 1e6)
BYTES = st.integers(0, 2**40)
STAGES = st.builds(
    StageCosts, TIMES, TIMES, TIMES, st.none() | TIMES, BYTES, st.none() | BYTES,
    st.dictionaries(st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W]), BYTES),
)  # fmt: skip


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    stages = tuple(draw(st.lists(STAGES, min_size=1, max_size=4)))
    sends, all_of = len(stages) - 1, len(stages)
    times = [
        tuple(draw(st.just([]) | st.lists(TIMES, min_size=count, max_size=count))) for count in (sends, sends, all_of, all_of)
    ]
    return Costs(stages, times[0], times[1], draw(TIMES), draw(st.booleans()), draw(TIMES), times[2], times[3])


@given(made=costs())
def test_what_asdict_writes_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, made: Costs) -> None:
    file = tmp_path_factory.getbasetemp() / "costs.json"
    file.write_text(json.dumps(asdict(made)))
    assert read_costs(file) == made


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"stages": [{}, {"forward": 2}]}')
    assert read_costs(file) == Costs((StageCosts(), StageCosts(forward=2)))


WHOLE = asdict(Costs.unit(2))


def stage(**changes: Any) -> str:
    return json.dumps({"stages": [{}, changes]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(WHOLE | {"stage": []}), r"take an object with stages, .*; got \['stage'\]"),
        (stage(forwards=1), r"stages\[1\]: take an object with forward, .*; got \['forwards'\]"),
        (stage(peak_bytes={"G": 1}), r"stages\[1\]\.peak_bytes: take F, B, I, W, .* as names, got 'G'"),
        (stage(peak_bytes={"F": 1.5}), r"peak_bytes\.F: take int"),
        (stage(peak_bytes={"F": -1}), "0 or more"),
        (stage(forward="1"), r"stages\[1\]\.forward: take float, got '1'"),
        (stage(forward=True), "forward: take float"),
        (stage(forward=-1), "0 or more"),
        (stage(saved_bytes=1.0), "saved_bytes: take int"),
        (json.dumps({"overlap": 1}), "missing stages"),
        (json.dumps({"stages": []}), "one stage or more"),
        (json.dumps({"stages": [{}], "sends_forward": [1, 2]}), "sends_forward has the times of 2 messages"),
        (json.dumps({"stages": [{}], "blocking": 1}), "blocking: take bool"),
        ('{"stages": [{}], "overlap": NaN}', "overlap: take float, got nan"),
        ('{"stages": [{"forward": 1e999}]}', "forward: take float, got inf"),
        ('{"stages": [{"forward": 1, "forward": 2}]}', "a field stands twice"),
        ("[]", "take a JSON object"),
        ("[" * 100_000, "recursion"),
        ('{"stages": [{"forward": ' + "9" * 5000 + "}]}", "costs.json"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(GraphPPError, match=said) as caught:
        read_costs(file)
    assert str(file) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GraphPPError, match="No such file"):
        read_costs(tmp_path / "none.json")
