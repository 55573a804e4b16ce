"""Check at some calls that forward and loss still compute what was captured.

A graph depends on state that nobody can list: patched functions, objects of libraries, the environment. `watch/` follows
changes of common state at once. An audit finds all others, later: it runs forward and loss once more on fake tensors, and
compares the operators with those of the capture (`operators.py`).

Contract: `Audit.check` audits the calls 2, 4, 8, .. of a graph, and then so rarely that audits take at most `_SHARE` of the
time; every n-th call if `every` is n, none if it is 0. A constant of which the code reads a number is audited at the first call
after it was written. `check` raises `CaptureError` at the first operator that differs, in this and each later call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from graphpp.capture.watch.operators import Operations, first_difference
from graphpp.errors import CaptureError
from graphpp.log import logger

_SHARE = 0.005
_LOG = logger(__name__)


class Audit:
    """The audits of one graph. `note` runs forward and loss; `by_time`: whether the time of an audit decides about the next.
    `told`: the warnings that are not logged again."""

    def __init__(
        self, note: Callable[[], Operations], every: int | None = None, by_time: bool = True, told: set[str] | None = None
    ) -> None:
        self._note, self._every, self._by_time, self._told = note, every, by_time, set() if told is None else told
        self._calls, self._next, self._good = 1, every or 2, 1  # the first call is the one that was captured
        self._captured = self._noted() if every != 0 else None
        self._asked = self._versions()
        self._ended, self._audited = time.perf_counter(), 1

    def check(self) -> None:
        """Count one call, and audit if it is due. Raises `CaptureError`."""
        self._calls += 1
        if self._captured is None or (self._calls < self._next and self._asked == self._versions()):
            return
        began = time.perf_counter()
        per_call = (began - self._ended) / (self._calls - self._audited)
        self._compare(self._captured)
        self._ended, self._audited, self._good, self._asked = time.perf_counter(), self._calls, self._calls, self._versions()
        rarely = math.ceil((self._ended - began) / (_SHARE * per_call)) if self._by_time else self._calls
        self._next = self._calls + (self._every or min(self._calls, max(1, rarely)))

    def _noted(self) -> Operations | None:
        try:
            return self._note()
        except CaptureError as error:
            text = f"unwatched state is not audited, because model and loss run only under a trace: {error}"
            if text not in self._told:
                self._told.add(text)
                _LOG.warning("%s", text)
            return None

    def _versions(self) -> list[int]:
        asked = () if self._captured is None else self._captured.asked
        return [tensor._version for tensor in asked if not tensor.is_inference()]

    def _compare(self, captured: Operations) -> None:
        try:
            now = self._note()
        except CaptureError as error:
            raise self._refusal(f"they can no longer be captured ({error})") from error
        at = first_difference(captured, now)
        if at is not None:
            was, found = (each.ran[at] if at < len(each.ran) else None for each in (captured, now))
            line = next((each.line for each in (found, was) if each is not None and each.line), "a line of a library")
            raise self._refusal(f"operator {at + 1}, at {line}, was {was or 'missing'} and is {found or 'missing'}")

    def _refusal(self, difference: str) -> CaptureError:
        return CaptureError(
            f"model and loss compute something else than at their capture: {difference}. The operators were the same at call "
            f"{self._good} of this graph, and this is call {self._calls}. State that graphpp does not watch has changed: call "
            "pipe.recapture() after such a change, or keep the number in a buffer of the model and compute with the tensor. "
            "Debug(audit=) sets how often this is checked."
        )
