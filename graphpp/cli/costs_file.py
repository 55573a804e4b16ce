"""Costs in a file: the fields of `graphpp.Costs` and `graphpp.StageCosts` as JSON.

Contract
    The document is an object with the fields of `Costs`; `stages` is a list of objects with the fields of `StageCosts`, whose
    `peak_bytes`, `received_bytes` and `sent_bytes` have the kinds F, B, I and W as keys; `flow` is an object with the fields of
    `MessageFlow`. A field that is left out has its default; `stages` may not be left out.
    `json.dumps(dataclasses.asdict(costs))` writes such a document. Raises `ScheduleError` that names file and field: for an
    unknown field, for a field that stands twice, for a value of another type, and for numbers that `Costs` refuses.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from graphpp.arguments import FLAG, INDEX, NUMBER, Accepted, or_none, refusal, shown
from graphpp.cli.schedule_inputs import readable
from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import BACKWARDS, Kind
from graphpp.schedules.table.costs import Costs, MessageFlow, StageCosts

T = TypeVar("T")
_TIME = Accepted("a number from 0 to 1e300", lambda value: NUMBER.accepts(value) and 0 <= value <= 1e300)  # type: ignore[operator]
_TIMES = Accepted("a list of numbers", lambda value: isinstance(value, list) and all(map(_TIME.accepts, value)))
_BYTES = Accepted("a whole number of bytes from 0 to 2**62", lambda value: type(value) is int and 0 <= value <= 2**62)
_OBJECT = Accepted("an object with names and values", lambda value: isinstance(value, dict))
_LIST = Accepted("a list of objects, one for each stage", lambda value: isinstance(value, list) and bool(value))

_STAGE: Mapping[str, Accepted] = {
    "forward": _TIME,
    "input_grad": _TIME,
    "weight_grad": _TIME,
    "backward": or_none(_TIME),
    "saved_bytes": _BYTES,
    "kept_bytes": or_none(_BYTES),
    "peak_bytes": _OBJECT,
    "received_bytes": _OBJECT,
    "sent_bytes": _OBJECT,
}
_ALL: Mapping[str, Accepted] = {
    "stages": _LIST,
    "sends_forward": _TIMES,
    "sends_backward": _TIMES,
    "overlap": _TIME,
    "blocking": FLAG,
    "overhead": _TIME,
    "gathers": _TIMES,
    "reductions": _TIMES,
    "flow": _OBJECT,
    "woven": FLAG,
}
_FLOW: Mapping[str, Accepted] = {"ahead": INDEX, "kept": INDEX}
_PEAKS: Mapping[str, Accepted] = {kind.value: _BYTES for kind in (Kind.F, *BACKWARDS)}
_BY_KIND = {"peak_bytes", "received_bytes", "sent_bytes"}
assert set(_STAGE) == {each.name for each in fields(StageCosts)}
assert set(_ALL) == {each.name for each in fields(Costs)}
assert set(_FLOW) == {each.name for each in fields(MessageFlow)}


def read_costs(path: Path) -> Costs:
    """The costs in a file of JSON."""
    try:
        document = json.loads(readable(path), object_pairs_hook=_once, parse_constant=_no_number)
    except ScheduleError as fault:
        raise ScheduleError(f"{path}: {fault}") from None
    except (ValueError, RecursionError) as fault:
        raise ScheduleError(f"{path} is no JSON: {fault}") from None
    given = _checked(str(path), document, _ALL)
    if "stages" not in given:
        raise ScheduleError(f"{path}: the field stages is missing: a list of objects with the costs of each stage")
    stages = [_stage(f"{path}, stages[{at}]", each) for at, each in enumerate(given.pop("stages"))]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    flow = _checked(f"{path}, flow", given.pop("flow", {}), _FLOW)
    return _made(str(path), lambda: Costs(tuple(stages), **given, flow=MessageFlow(**flow)))


def _stage(where: str, document: object) -> StageCosts:
    given = _checked(where, document, _STAGE)
    for name in _BY_KIND & given.keys():
        by_kind = _checked(f"{where}.{name}", given[name], _PEAKS)
        given[name] = {Kind(kind): count for kind, count in by_kind.items()}
    return _made(where, lambda: StageCosts(**given))


def _checked(where: str, document: object, known: Mapping[str, Accepted]) -> dict[str, Any]:
    """The object, whose fields all are known and have values of the right types."""
    if not isinstance(document, dict):
        raise ScheduleError(f"{where}: {refusal(_OBJECT, document)}")
    for name, value in document.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]}?" if near else "."
            raise ScheduleError(f"{where}: there is no field {shown(name)}{hint} The fields are {', '.join(known)}")
        if not known[name].accepts(value):
            raise ScheduleError(f"{where}: {name}: {refusal(known[name], value)}")
    return dict(document)


def _made(where: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (ScheduleError, OverflowError) as fault:
        raise ScheduleError(f"{where}: {fault}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of one object, none of which may stand twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ScheduleError(f"the field {shown(name)} stands twice in one object")
        found[name] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise ScheduleError(f"{text} is no number of JSON; times and bytes are finite")
