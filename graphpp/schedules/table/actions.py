"""One instruction of a schedule, written as `torch.distributed.pipelining` writes it.

An action says which stage runs which kind of work on which microbatch. `str(parse(text)) == text`, `parse(str(action)) ==
action`.
    2F0                       stage 2 runs the forward of microbatch 0
    2B0   2I0   2W0           its backward: whole, input gradients only, weight gradients only (B = I + W)
    2R0                       stage 2 recomputes forward values of microbatch 0, which its B, or I and W, then read
    2SEND_F0   3RECV_F0       stage 2 sends its activations of microbatch 0, stage 3 receives them
    2SEND_B0   1RECV_B0       stage 2 sends input gradients, stage 1 receives them
    3UNSHARD   3RESHARD   3REDUCE_GRAD         once for a stage, so without a microbatch
    (0F3;3B1)OVERLAP_F_B      the parts run interleaved; no part may wait for another
    (0SEND_F1;0RECV_B0)P2P    the parts are posted as one batch
torch has no R and no P2P. An R stands between the F and the B or I of its stage and microbatch, and is no part of an overlap.
It marks its (stage, microbatch) as recomputed; one that is only marked (`recompute_marks`) recomputes within its B or I.
Only this file defines the data flow between stages: `inputs`, `upstream`, `message`, `peer`, `computations`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, NoReturn

from graphpp.errors import ScheduleError


class Kind(StrEnum):
    """The kind of work of an action; the values of torch's `_ComputationType`, and R and P2P, which torch lacks."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the letter torch and the zero-bubble papers use
    W = "W"
    R = "R"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"
    P2P = "P2P"


BACKWARDS = (Kind.B, Kind.I, Kind.W)
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.OVERLAP_F_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
COMMUNICATION = SENDS | {Kind.RECV_F, Kind.RECV_B, Kind.P2P}
WITH_PARTS = {Kind.OVERLAP_F_B: frozenset({Kind.F, *BACKWARDS}), Kind.P2P: COMMUNICATION - {Kind.P2P}}
"""The kinds of action that have parts, with the kinds that their parts may have."""
PER_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

_EXAMPLES = "write [stage][kind][microbatch], for instance 2F0, 2SEND_F0, 3UNSHARD or (0F3;3B1)OVERLAP_F_B"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_WORD = re.compile(r"P2P|[A-Za-z_]+")
_OF = {
    Kind.OVERLAP_F_B: "only F, B, I and W can be overlapped",
    Kind.P2P: "only sends and receives can be one batch",
}


class Action(NamedTuple):
    """One instruction. `stage` is -1 for OVERLAP_F_B and P2P, whose `parts` carry the stages, as in torch."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __repr__(self) -> str:  # str() uses it too
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """True for F, B, I, W, R and OVERLAP_F_B, the only kinds in a schedule without communication."""
        return self.kind in COMPUTE

    @property
    def is_communication(self) -> bool:
        """True for the sends and receives between stages, and for batches of them."""
        return self.kind in COMMUNICATION

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of an overlap or a batch; for any other action, the action itself."""
        return self.parts or (self,)


_CACHED = 1 << 16  # actions; rewrites and simulations look up the same ones many times
_PEER = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


@lru_cache(_CACHED)
def upstream(action: Action, stages: int) -> tuple[Action, ...]:
    """The computations of the neighbouring stage, one of which makes the value that `action` reads; () if there are none.

    A forward reads the forward one stage below. A B or an I reads the B or the I one stage above.
    """
    if action.kind is Kind.F and action.stage > 0:
        return (action._replace(stage=action.stage - 1),)
    if action.kind in (Kind.B, Kind.I) and action.stage < stages - 1:
        above = action.stage + 1
        return Action(above, Kind.B, action.microbatch), Action(above, Kind.I, action.microbatch)
    return ()


@lru_cache(_CACHED)
def message(action: Action, stages: int) -> tuple[Action, Action] | None:
    """The send and the receive that carry the result of `action` to the neighbouring stage; None at either end of the model."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F and stage < stages - 1:
        return Action(stage, Kind.SEND_F, microbatch), Action(stage + 1, Kind.RECV_F, microbatch)
    if action.kind in (Kind.B, Kind.I) and stage > 0:
        return Action(stage, Kind.SEND_B, microbatch), Action(stage - 1, Kind.RECV_B, microbatch)
    return None


@lru_cache(_CACHED)
def inputs(action: Action, stages: int) -> tuple[tuple[Action, ...], ...]:
    """For each value that a computation reads, the computations of which any one makes that value.

    A B, an I or an R reads the values that its stage's forward saved, a W the values that its I left, and all read `upstream`.
    """
    own = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.R: Kind.F, Kind.W: Kind.I}.get(action.kind)
    makers = upstream(action, stages)
    return (*([(action._replace(kind=own),)] if own else []), *([makers] if makers else []))


@lru_cache(_CACHED)
def computations(message: Action) -> tuple[Action, ...]:
    """The computations on a message's own stage, one of which makes the value it sends, or reads the value it receives."""
    kinds = (Kind.F,) if message.kind in (Kind.SEND_F, Kind.RECV_F) else (Kind.B, Kind.I)
    return tuple(message._replace(kind=kind) for kind in kinds)


@lru_cache(_CACHED)
def peer(message: Action) -> Action:
    """The other end of a message: the receive of a send, the send of a receive."""
    kind, step = _PEER[message.kind]
    return message._replace(stage=message.stage + step, kind=kind)


def send_of(message: Action) -> Action:
    """The send of a message: the action itself, or the other end of a receive."""
    return message if message.kind in SENDS else peer(message)


def has_right_parts(action: Action) -> bool:
    """Whether an action has parts exactly if its kind needs parts, and only single actions of allowed kinds."""
    if not action.parts:
        return action.kind not in WITH_PARTS
    return all(not part.parts and part.kind in WITH_PARTS.get(action.kind, ()) for part in action.parts)


def parse(text: str) -> Action:
    """Read one action, with nothing left over. Raises `ScheduleError` naming the column in `text`, counted from 1."""
    action, end = _compound(text) if text.startswith("(") else _plain(text, 0)
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


def _compound(text: str) -> tuple[Action, int]:
    parts: list[Action] = []
    at = 0
    while text.startswith(";" if parts else "(", at):
        part, end = _plain(text, at + 1)
        parts.append(part)
        at = end
    kind = next((kind for kind in WITH_PARTS if text.startswith(f"){kind.value}", at)), None)
    if kind is None:
        _fault(text, at, "';', ')OVERLAP_F_B' or ')P2P' is missing")
    _check_parts(text, kind, parts)
    return Action(-1, kind, None, tuple(parts)), at + 1 + len(kind.value)


def _check_parts(text: str, kind: Kind, parts: list[Action]) -> None:
    at = 1
    for part in parts:
        if part.kind not in WITH_PARTS[kind]:
            _fault(text, at, f"{part} cannot be in {kind.value}: {_OF[kind]}")
        at += len(str(part)) + 1
    if len(parts) < 2:
        _fault(text, at - 1, f"{kind.value} needs two parts")


def _number(text: str, at: int) -> tuple[int | None, int]:
    found = _NUMBER.match(text, at)
    return (int(found[0]), found.end()) if found else (None, at)


def _kind(text: str, at: int) -> tuple[Kind, int]:
    found = _WORD.match(text, at)
    word = found[0] if found else ""
    if word not in Kind.__members__ or word in WITH_PARTS:
        wrong = word or text[at:]
        _fault(text, at, f"{wrong!r} is no kind of a single action" if wrong else "a kind is missing")
    return Kind(word), at + len(word)


def _fault(text: str, at: int, what: str) -> NoReturn:
    raise ScheduleError(f"action {text!r}, column {at + 1}: {what}; {_EXAMPLES}")
