"""Training text that every machine with Python has: the sources of the standard library, as bytes.

Contract: `corpus()` returns the same bytes on every run of one Python, and `batch(data, seed, ...)` depends on its arguments
only. So all ranks of a pipeline, and the one process with which they are compared, see the same tokens.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def corpus(limit: int = 4_000_000) -> Tensor:
    """The first `limit` bytes of the standard library's top-level modules, in order of name: uint8 [bytes].

    Raises FileNotFoundError where Python was installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    if not data:
        raise FileNotFoundError(f"no Python sources in {folder}")
    return torch.frombuffer(data, dtype=torch.uint8)[:limit]


def batch(data: Tensor, seed: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text and the bytes that follow each: tokens and targets, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length, (rows, 1), generator=generator)
    windows = data[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
