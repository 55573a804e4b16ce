"""Dumps: one hook on the recipe (placeholder, completed below)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from graphpp.passes.joint import JointGraph
from graphpp.passes.lower import Passed

T = TypeVar("T")


class Dump:
    def __init__(self, folder: Path | None, rank: int, kind: str) -> None:
        self.folder = folder

    def timed(self, name: str, step: Callable[[], T]) -> T:
        return step()

    def joint(self, joint: JointGraph) -> None: ...

    def plan(self, plan: Any, schedule: Any) -> None: ...

    def __call__(self, passed: Passed) -> None: ...
