"""The time that a rank waits for another one, in steps and while a call is compiled.

Contract: the process groups of a rank have the timeout of steps, and inside of `starting` the timeout of the start; where an
option is None, the timeout that the group had before. A process group that the user made keeps the timeout of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch.distributed as dist

from graphpp._torch.distributed import set_timeout, timeout_of


class Timeouts:
    """`step`, `start`: seconds that a rank waits in a step, and while a call is compiled; None: the group's own timeout."""

    def __init__(self, groups: Iterable[dist.ProcessGroup | None], step: float | None, start: float | None) -> None:
        given = step is not None or start is not None
        self._own = [(group, timeout_of(group)) for group in groups if group is not None] if given else []
        self._step, self._start = step, start
        self._set(step)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A context in which a call is compiled."""
        self._set(self._start)
        try:
            yield
        finally:
            self._set(self._step)

    def _set(self, seconds: float | None) -> None:
        for group, own in self._own:
            set_timeout(group, own if seconds is None else timedelta(seconds=seconds))
