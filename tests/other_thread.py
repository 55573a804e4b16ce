"""Run a function in another thread at a chosen moment: `elsewhere` waits for the thread, so no test depends on timing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

WAIT = 300.0  # seconds until a thread that hangs fails its test


def elsewhere(function: Callable[[], Any]) -> Any:
    """The result of a function that another thread runs; raises the function's error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT)
    result, error = found[0]
    if error is not None:
        raise error
    return result
