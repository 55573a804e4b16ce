"""Memory that the CPU's allocator keeps when it is freed: kept between steps, given back after a release.

Contract
    glibc's allocator gives memory at the end of its heap back to the system when more of it is free than a threshold, and takes
    it anew in the next step, page by page: under GPipe that is 7 % of a step of small layers. The threshold is twice the size
    of the largest block with a mapping of its own that the process has freed so far, up to 64 MiB: a training of small tensors
    never frees such a block. `keep_freed_memory` frees one that nobody has written to, so it never took memory. Afterwards up
    to 64 MiB that are free stay in the process. Where the user has set a threshold (`MALLOC_TRIM_THRESHOLD_`), and with any
    other allocator, nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

_LARGEST = 2**25  # bytes of the largest block after whose end glibc raises the threshold
_MARGIN = 2**14  # for the allocator's own numbers, alignment and whole pages
_LITTLE = 2**20  # bytes that may stay with the process


def keep_freed_memory(device: torch.device) -> None:
    """Let the allocator of the CPU keep freed memory; the allocator of a GPU keeps freed memory anyway."""
    if device.type == "cpu":
        torch.UntypedStorage(_LARGEST - _MARGIN)  # `torch.empty` follows a default device, and may fill the memory


def trim_after(freed: int) -> None:
    """Give the machine the freed memory that the C library keeps, of blocks below 32 MiB, if `freed` bytes can be much."""
    if freed > _LITTLE:
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has the function
            ctypes.CDLL(None).malloc_trim(0)
