"""The name of this machine's processor."""

from __future__ import annotations

from pathlib import Path


def processor_name() -> str:
    """The model name in `/proc/cpuinfo`; "unknown" if missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
