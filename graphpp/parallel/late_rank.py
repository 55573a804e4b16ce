"""Asks a rank over the store whether its process runs, and which line of the program it has reached.

Contract:
- `start` starts one thread in this process. The thread has its own connection to the store, and reads the store only if no call
  of a pipeline has begun or ended for `_interval()` seconds. It ends with the process group.
- While no call begins or ends, this thread calls `look` of each object given to `when_idle`, in a thread of its own.
- `ask` waits `_PATIENCE` intervals for answers. A rank without an answer is stopped: by a signal or a debugger, with its host,
  or by native code that does not release the interpreter.
- The interval grows with the number of ranks, so that all ranks together read the store at most 500 times a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from graphpp._torch.distributed import Store, default_store, own_connection

_PATIENCE = 4  # intervals
_QUESTIONS_PER_SECOND = 500
_ENDED = 16  # calls
_KEY = "graphpp/late"
_LIBRARIES = tuple(os.path.join(os.path.dirname(path), "") for path in (os.path.dirname(__file__), torch.__file__, os.__file__))


@dataclass(frozen=True)
class Answer:
    """The pipeline call that a rank is in (None: none), the latest calls that have ended there, and the line it has reached."""

    call: str | None
    ended: Sequence[str]
    line: str


class Watcher(Protocol):
    def look(self) -> None:
        """Look for something wrong; takes a few seconds, or `patience()` if it asks other ranks."""


@dataclass
class SlowWaits:
    """Which waits a warning is for: those of more than `limit` seconds, and none for 10 times as long after a warning."""

    limit: float
    _quiet_until: float = 0.0

    def says(self, seconds: float) -> bool:
        now = time.monotonic()
        if seconds < self.limit or now < self._quiet_until:
            return False
        self._quiet_until = now + 10 * self.limit
        return True


@dataclass
class _Progress:
    """This process's calls: how many have begun or ended, the running one, the latest that have ended, the thread."""

    count: int = 0
    call: str | None = None
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=_ENDED))
    thread: int = threading.get_ident()


_PROGRESS = _Progress()
_WATCHERS = weakref.WeakSet["Watcher"]()
_ANSWERING: list[tuple[Store, threading.Thread]] = []  # the thread of the current process group's store


@contextlib.contextmanager
def calling(call: str) -> Iterator[None]:
    """A context around a pipeline call of all ranks; `call` is equal on all ranks."""
    outer = _PROGRESS.call
    _PROGRESS.count += 1
    _PROGRESS.call, _PROGRESS.thread = call, threading.get_ident()
    try:
        yield
    finally:
        _PROGRESS.count += 1
        _PROGRESS.ended.append(call)
        _PROGRESS.call = outer


def when_idle(watcher: Watcher) -> None:
    """Let `watcher` look once per interval in which no call begins or ends, as long as the object lives."""
    _WATCHERS.add(watcher)


def start() -> None:
    """Let this process answer other ranks. Does nothing if it already answers, or without a process group."""
    store = default_store() if dist.is_initialized() else None
    answers = any(known is store and thread.is_alive() for known, thread in _ANSWERING)
    if store is not None and not answers and dist.get_world_size() > 1:
        thread = threading.Thread(target=_answer, args=(store, dist.get_rank()), name="graphpp late rank", daemon=True)
        _ANSWERING[:] = [(store, thread)]
        thread.start()


def ask(ranks: Iterable[int]) -> dict[int, Answer | None]:
    """The answers of these world ranks; None for a rank without an answer. Raises `RuntimeError` without a store."""
    store = default_store()
    keys = {rank: f"{_KEY}/{rank}/{store.add(f'{_KEY}/{rank}', 1)}" for rank in ranks}
    until = time.monotonic() + patience()
    answers: dict[int, Answer | None] = dict.fromkeys(keys)
    while time.monotonic() < until and not all(answers.values()):
        for rank, key in keys.items():
            if answers[rank] is None and store.check([key]):
                answers[rank] = Answer(*json.loads(store.get(key)))
        time.sleep(0.05)
    return answers


def patience() -> float:
    return _PATIENCE * _interval()


def _answer(store: Store, rank: int) -> None:
    answered, seen, question, looking = 0, -1, f"{_KEY}/{rank}", None
    try:
        own = own_connection(store)
        while dist.is_initialized() and default_store() is store:
            if seen == _PROGRESS.count and own.check([question]) and (asked := own.add(question, 0)) > answered:
                answer = json.dumps([_PROGRESS.call, list(_PROGRESS.ended), line()])
                for number in range(answered + 1, asked + 1):  # several ranks may have asked
                    own.set(f"{question}/{number}", answer)
                answered = asked
            if seen == _PROGRESS.count and _WATCHERS and (looking is None or not looking.is_alive()):
                looking = threading.Thread(target=_look, name="graphpp idle", daemon=True)
                looking.start()
            seen = _PROGRESS.count
            time.sleep(_interval())
    except (RuntimeError, ValueError):  # the host of the store or the process group has ended
        return


def _look() -> None:
    try:
        for watcher in list(_WATCHERS):
            watcher.look()
    except (RuntimeError, ValueError, KeyError):  # the process group has ended meanwhile
        if dist.is_initialized():
            raise


def _interval() -> float:
    return max(1.0, dist.get_world_size() / _QUESTIONS_PER_SECOND) if dist.is_initialized() else 1.0


def line() -> str:
    """The innermost line of user code on the stack of the thread that makes the calls."""
    frame: FrameType | None = sys._current_frames().get(_PROGRESS.thread)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    found = frame or innermost
    return "an unknown line" if found is None else f"{found.f_code.co_filename}:{found.f_lineno} ({found.f_code.co_name})"
