"""The notation of actions is torch's; text and value are one-to-one; malformed text is refused at its column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import (
    COMMUNICATION,
    COMPUTE,
    PER_STAGE,
    WITH_PARTS,
    Action,
    Kind,
    message,
    parse,
    upstream,
)

NUMBERS = st.integers(0, 999_999_999)
PER_MICROBATCH = sorted(set(Kind) - PER_STAGE - set(WITH_PARTS))
SINGLE = st.tuples(NUMBERS, st.sampled_from(PER_MICROBATCH), NUMBERS).map(lambda fields: Action(*fields))
WHOLE_STAGE = st.tuples(NUMBERS, st.sampled_from(sorted(PER_STAGE))).map(lambda fields: Action(*fields))
PARTS = st.lists(SINGLE.filter(lambda action: action.kind in WITH_PARTS[Kind.OVERLAP_F_B]), min_size=2, max_size=3).map(tuple)
OVERLAP = PARTS.map(lambda parts: Action(-1, Kind.OVERLAP_F_B, None, parts))
MESSAGES = st.lists(SINGLE.filter(lambda action: action.is_communication), min_size=2, max_size=4).map(tuple)
BATCH = MESSAGES.map(lambda parts: Action(-1, Kind.P2P, None, parts))
ACTIONS = SINGLE | WHOLE_STAGE | OVERLAP


@given(ACTIONS | BATCH)
def test_text_and_value_are_one_to_one(action: Action) -> None:
    assert parse(str(action)) == action
    assert str(parse(str(action))) == str(action)


@given(ACTIONS)
def test_torch_reads_and_writes_the_same(action: Action) -> None:
    theirs = torch_schedules._Action.from_str(str(action))
    assert str(theirs) == str(action)
    assert (theirs.stage_index, theirs.computation_type.value) == (action.stage, action.kind.value)
    assert theirs.microbatch_index == action.microbatch
    assert theirs.is_compute_op == action.is_compute


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("2SEND_F0", Action(2, Kind.SEND_F, 0)),
        ("3UNSHARD", Action(3, Kind.UNSHARD)),
        ("12RECV_B34", Action(12, Kind.RECV_B, 34)),
        (
            "(0F3;3B1)OVERLAP_F_B",
            Action(-1, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 3), Action(3, Kind.B, 1))),
        ),
        (
            "(0SEND_F1;0RECV_B0)P2P",
            Action(-1, Kind.P2P, None, (Action(0, Kind.SEND_F, 1), Action(0, Kind.RECV_B, 0))),
        ),
    ],
)
def test_notation(text: str, action: Action) -> None:
    assert parse(text) == action
    assert str(action) == repr(action) == text
    assert action.is_compute == (action.kind in COMPUTE)
    assert action.is_communication == (action.kind in COMMUNICATION)
    assert len({action, parse(text)}) == 1


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("", 1, "stage number is missing"),
        ("F0", 1, "stage number is missing"),
        (" 2F0", 1, "stage number is missing"),
        ("-1F0", 1, "stage number is missing"),
        ("2", 2, "kind is missing"),
        ("2F", 3, "F needs a microbatch"),
        ("2RECV_F", 8, "RECV_F needs a microbatch"),
        ("2F0 ", 4, "' ' is left over"),
        ("2F0junk", 4, "'junk' is left over"),
        ("2F0,2F1", 4, "',2F1' is left over"),
        ("2F-1", 3, "F needs a microbatch"),
        ("2f0", 2, "'f' is no kind"),
        ("2FORWARD0", 2, "'FORWARD' is no kind"),
        ("2\N{SUPERSCRIPT TWO}F0", 2, "is no kind"),
        ("2F\N{ARABIC-INDIC DIGIT ONE}", 3, "F needs a microbatch"),
        ("02F0", 2, "'2F0' is no kind"),
        ("2F00", 4, "'0' is left over"),
        ("2WAIT_SEND_F0", 2, "'WAIT_SEND_F' is no kind"),
        ("3UNSHARD1", 9, "'1' is left over"),
        ("2OVERLAP_F_B0", 2, "'OVERLAP_F_B' is no kind of a single action"),
        ("(0F3;3B1)", 9, "';', ')OVERLAP_F_B' or ')P2P' is missing"),
        ("(0F3;3B1", 9, "';', ')OVERLAP_F_B' or ')P2P' is missing"),
        ("(0F3;3B1)OVERLAP_F_B0", 21, "'0' is left over"),
        ("(0F3; 3B1)OVERLAP_F_B", 6, "stage number is missing"),
        ("(0F3;3B)OVERLAP_F_B", 8, "B needs a microbatch"),
        ("(0F3)OVERLAP_F_B", 5, "two parts"),
        ("()OVERLAP_F_B", 2, "stage number is missing"),
        ("(0F3;0SEND_F2)OVERLAP_F_B", 6, "0SEND_F2 cannot be in OVERLAP_F_B: only F, B, I and W"),
        ("(0SEND_F2;0RECV_B1;0F3)P2P", 20, "0F3 cannot be in P2P: only sends and receives"),
        ("(0SEND_F2)P2P", 10, "two parts"),
        ("(0SEND_F2;0RECV_B1)P2P3", 23, "'3' is left over"),
        ("2P2P0", 2, "'P2P' is no kind of a single action"),
        ("((0SEND_F2;0RECV_B1)P2P;0F2)OVERLAP_F_B", 2, "stage number is missing"),
        ("((0F1;0B0)OVERLAP_F_B;0F2)OVERLAP_F_B", 2, "stage number is missing"),
    ],
)
def test_malformed(text: str, column: int, what: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    assert f"action {text!r}, column {column}: " in str(caught.value)
    assert what in str(caught.value)


@given(st.text(alphabet="0129FBIW_SENDRCV();OLAP ", max_size=24))
def test_any_text_is_an_action_or_refused(text: str) -> None:
    try:
        action = parse(text)
    except ScheduleError:
        return
    assert str(action) == text


def test_data_flow_between_neighbours() -> None:
    def flow(text: str) -> tuple[str, str]:
        action = parse(text)
        return " ".join(map(str, upstream(action, 4))), " ".join(map(str, message(action, 4) or ()))

    assert flow("0F5") == ("", "0SEND_F5 1RECV_F5")
    assert flow("2F5") == ("1F5", "2SEND_F5 3RECV_F5")
    assert flow("3F5") == ("2F5", "")
    assert flow("3B5") == ("", "3SEND_B5 2RECV_B5")
    assert flow("3I5") == ("", "3SEND_B5 2RECV_B5")
    assert flow("1I5") == ("2B5 2I5", "1SEND_B5 0RECV_B5")
    assert flow("0B5") == ("1B5 1I5", "")
    assert flow("1W5") == flow("1UNSHARD") == flow("1SEND_F5") == ("", "")
