"""One instruction of a schedule, written as `torch.distributed.pipelining` writes it.

Contract
    An action says which stage does what with which microbatch. It is data: hashable, and text and value are
    one-to-one, `str(parse(text)) == text` and `parse(str(action)) == action`.

        2F0                       stage 2 runs the forward of microbatch 0
        2B0   2I0   2W0           its backward: whole, input gradients only, weight gradients only (B = I + W)
        2SEND_F0   3RECV_F0       stage 2 sends its activations of microbatch 0, stage 3 receives them
        2SEND_B0   1RECV_B0       stage 2 sends input gradients, stage 1 receives them
        3UNSHARD   3RESHARD   3REDUCE_GRAD         once for a stage, so without a microbatch
        (0F3;3B1)OVERLAP_F_B      the parts run woven into each other; no part may wait for another

    `upstream` and `message` are the data flow between neighbouring stages. Every other file takes it from here.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple, NoReturn

from graphpp.errors import ScheduleError


class Kind(StrEnum):
    """What an action does; the values are those of torch's `_ComputationType`."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the letter torch and the zero-bubble papers use
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
COMMUNICATION = SENDS | {Kind.RECV_F, Kind.RECV_B}
PER_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

_EXAMPLES = "write [stage][kind][microbatch], for instance 2F0, 2SEND_F0, 3UNSHARD or (0F3;3B1)OVERLAP_F_B"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_WORD = re.compile(r"[A-Za-z_]+")


class Action(NamedTuple):
    """One instruction. `stage` is -1 for OVERLAP_F_B, whose `parts` carry the stages, as in torch."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __repr__(self) -> str:  # and so str()
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """True for F, B, I, W and OVERLAP_F_B: what a schedule without communication consists of."""
        return self.kind in COMPUTE

    @property
    def is_communication(self) -> bool:
        """True for the sends and receives between stages."""
        return self.kind in COMMUNICATION

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of an overlapped action; any other action itself."""
        return self.parts or (self,)


def upstream(action: Action, stages: int) -> tuple[Action, ...]:
    """Actions of the neighbouring stage, one of which makes what `action` reads; empty where nothing crosses.

    A forward reads the forward one stage below; a backward, whole or input-only, reads either form one stage above.
    """
    if action.kind is Kind.F and action.stage > 0:
        return (action._replace(stage=action.stage - 1),)
    if action.kind in (Kind.B, Kind.I) and action.stage < stages - 1:
        above = action.stage + 1
        return Action(above, Kind.B, action.microbatch), Action(above, Kind.I, action.microbatch)
    return ()


def message(action: Action, stages: int) -> tuple[Action, Action] | None:
    """The send and the receive that carry the result of `action` to the neighbouring stage; None at either end."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F and stage < stages - 1:
        return Action(stage, Kind.SEND_F, microbatch), Action(stage + 1, Kind.RECV_F, microbatch)
    if action.kind in (Kind.B, Kind.I) and stage > 0:
        return Action(stage, Kind.SEND_B, microbatch), Action(stage - 1, Kind.RECV_B, microbatch)
    return None


def parse(text: str) -> Action:
    """Read one action, strictly: no blanks, no leading zeros, nothing left over.

    Raises `ScheduleError` naming the column in `text`, counted from 1. Unlike torch's `_Action.from_str`, which
    takes `2F0junk`, `2F` and unknown parts of an overlap.
    """
    action, end = _overlap(text) if text.startswith("(") else _plain(text, 0)
    if end != len(text):
        _fault(text, end, f"{text[end:]!r} is left over")
    return action


def _plain(text: str, start: int) -> tuple[Action, int]:
    stage, at = _number(text, start)
    if stage is None:
        _fault(text, start, "a stage number is missing")
    kind, end = _kind(text, at)
    if kind in PER_STAGE:
        return Action(stage, kind), end
    microbatch, end = _number(text, end)
    if microbatch is None:
        _fault(text, end, f"{kind.value} needs a microbatch number")
    return Action(stage, kind, microbatch), end


def _overlap(text: str) -> tuple[Action, int]:
    parts: list[Action] = []
    at = 0
    while text.startswith(";" if parts else "(", at):
        part, end = _plain(text, at + 1)
        if not part.is_compute:
            _fault(text, at + 1, f"{part} is no computation, and only F, B, I and W can be overlapped")
        parts.append(part)
        at = end
    close = f"){Kind.OVERLAP_F_B.value}"
    if not text.startswith(close, at):
        _fault(text, at, f"';' or '{close}' is missing")
    if len(parts) < 2:
        _fault(text, at, "an overlap needs two parts")
    return Action(-1, Kind.OVERLAP_F_B, None, tuple(parts)), at + len(close)


def _number(text: str, at: int) -> tuple[int | None, int]:
    found = _NUMBER.match(text, at)
    return (int(found[0]), found.end()) if found else (None, at)


def _kind(text: str, at: int) -> tuple[Kind, int]:
    found = _WORD.match(text, at)
    word = found[0] if found else ""
    if word not in Kind.__members__ or word == Kind.OVERLAP_F_B:
        wrong = word or text[at:]
        _fault(text, at, f"{wrong!r} is no kind of a single action" if wrong else "a kind is missing")
    return Kind(word), at + len(word)


def _fault(text: str, at: int, what: str) -> NoReturn:
    raise ScheduleError(f"action {text!r}, column {at + 1}: {what}; {_EXAMPLES}")
