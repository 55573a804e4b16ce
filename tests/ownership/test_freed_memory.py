"""Freed memory of the CPU stays in the process, counted by the pages that the system hands out anew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys, torch
from graphpp.ownership.freed_memory import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(100_000) for _ in range(160)]  # 16 MB, of blocks that have no mapping of their own
    for block in blocks:
        library.memset(block, 1, 100_000)
    for block in reversed(blocks):
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    torch.set_default_device("meta")
    keep_freed_memory(torch.device("cpu"))
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator than glibc's")
def test_freed_memory_stays() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, env=environment).stdout)
        for how in ("kept", "given back")
    )
    assert kept < 100 and given_back > 3000, (kept, given_back)
