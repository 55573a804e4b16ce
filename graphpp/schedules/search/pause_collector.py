"""Pause Python's collector of reference cycles while the search makes millions of tuples.

Contract
    `paused_collector` leaves the collector as it was, also after an error. The search makes hardly any reference cycles, so
    reference counts free its memory; each collection would visit every live operation and element.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Run the body without collections of reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
