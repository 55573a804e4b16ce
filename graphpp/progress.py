"""Show work that takes more than two seconds: a bar on the terminal of the first rank, a line in the log elsewhere.

`working("capturing the model")` is a context manager around the work; its value is called after each of `total` steps. The
terminal is clean afterwards. Without a terminal, and on other ranks than torchrun's first, the logger gets a line
after two seconds and one at the end. The work may end with any exception. Nothing is drawn inside another display of rich.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from graphpp.log import logger

_LOG = logger(__name__)
_PATIENCE = 2.0  # seconds


@contextmanager
def working(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show `what` while the block runs. `total`: the number of steps; None: unknown."""
    on_terminal = os.environ.get("RANK", "0") == "0" and sys.stderr is not None and sys.stderr.isatty()
    shown = (_Bar if on_terminal else _Lines)(what, total)
    timer = threading.Timer(_PATIENCE, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.step
    finally:
        timer.cancel()
        try:
            timer.join()  # the bar is complete before it is removed
        finally:
            shown.stop()


class _Lines:
    """Lines in the log, and the count of steps."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = time.monotonic()
        self._started = False

    def start(self) -> None:
        self._started = True
        _LOG.info("%s%s", self._what, f": {self._done} of {self._total}" if self._total is not None else " ..")

    def step(self) -> None:
        self._done += 1

    def stop(self) -> None:
        if self._started:
            _LOG.info("%s: ended after %.1f s", self._what, time.monotonic() - self._began)


class _Bar(_Lines):
    _progress: Any = None

    def start(self) -> None:
        from rich.console import Console  # loaded by the first work that takes long
        from rich.errors import LiveError
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counted = [MofNCompleteColumn()] if self._total is not None else []
        columns = TextColumn("{task.description}"), BarColumn(), *counted, TimeElapsedColumn()
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.add_task(self._what, total=self._total, completed=self._done)
        with suppress(LiveError):
            progress.start()
            self._progress = progress

    def step(self) -> None:
        super().step()
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._done)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
