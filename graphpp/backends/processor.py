"""The name of this machine's processor, on which the fastest kernel of a matrix product depends."""

from __future__ import annotations

from pathlib import Path


def processor_name() -> str:
    """The name by `/proc/cpuinfo`; "unknown" where the file or the name is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
