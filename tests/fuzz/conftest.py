"""Captures under pytest are fast."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_structured_trace() -> Iterator[None]:
    """pytest listens to loggers that do not propagate; torch takes that for the wish for a trace, and writes one."""
    trace = logging.getLogger("torch.__trace")
    handlers, trace.handlers = trace.handlers, []
    yield
    trace.handlers = handlers
