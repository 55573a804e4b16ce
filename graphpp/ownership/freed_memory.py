"""Keeps memory that the CPU's allocator frees in the process between steps, and returns it to the system after a release.

glibc returns memory at the end of its heap to the system when more of it is free than a threshold, and takes it back in the
next step, page by page: under GPipe 7 % of a step of small layers. The threshold is twice the size of the largest separately
mapped block that the process has freed, up to 64 MiB; training with small tensors never frees such a block. `keep_freed_memory`
frees one that was never written to, so it takes no memory; afterwards up to 64 MiB of free memory stay in the process. A
threshold set by the user (`MALLOC_TRIM_THRESHOLD_`) and other allocators are not affected.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

_LARGEST = 2**25  # bytes of the largest block after whose end glibc raises the threshold
_MARGIN = 2**14  # for the allocator's own numbers, alignment and whole pages
_LITTLE = 2**20  # bytes that may stay with the process


def keep_freed_memory(device: torch.device) -> None:
    """Let the CPU's allocator keep freed memory; a GPU's allocator does so anyway."""
    if device.type == "cpu":
        torch.UntypedStorage(_LARGEST - _MARGIN)  # `torch.empty` follows a default device, and may fill the memory


def trim_after(freed: int) -> None:
    """Return free blocks below 32 MiB from the C library to the system, if more than `_LITTLE` bytes were `freed`."""
    if freed > _LITTLE:
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has the function
            ctypes.CDLL(None).malloc_trim(0)
