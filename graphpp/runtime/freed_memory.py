"""Keep the memory that a step frees on the CPU in the process, for the next step.

Contract
    glibc's allocator gives memory at the end of its heap back to the system when more of it is free than a threshold, and takes
    it anew in the next step, page by page: under GPipe that is 7 % of a step of small layers. The threshold is twice the size
    of the largest block with a mapping of its own that the process has freed so far, up to 64 MiB. A training of large tensors
    has freed such a block sooner or later, and one of small tensors never does.
    `keep_freed_memory` frees such a block, which nobody has written to, so it never took memory. Afterwards up to 64 MiB that
    are free stay in the process. Where the user has set a threshold (`MALLOC_TRIM_THRESHOLD_`), and with any other allocator,
    nothing changes.
"""

from __future__ import annotations

import torch

_LARGEST = 2**25  # bytes of the largest block after whose end glibc raises the threshold
_MARGIN = 2**14  # for the allocator's own numbers, alignment and whole pages


def keep_freed_memory(device: torch.device) -> None:
    """Let the allocator of the CPU keep freed memory; the allocator of a GPU keeps freed memory anyway."""
    if device.type == "cpu":
        torch.UntypedStorage(_LARGEST - _MARGIN)  # `torch.empty` follows a default device, and may fill the memory
