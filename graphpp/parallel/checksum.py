"""Checksums by which ranks compare tensors without sending them."""

from __future__ import annotations

import torch

_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # odd, with bits in all places
_CHUNK = 2**18  # elements that are weighted at once, in several temporary integers each


def checksum(tensor: torch.Tensor) -> int:
    """An integer of 64 bits, equal for equal bits in the same order; almost always another one for other bits or another order.

    Computed on the tensor's device, with one wait for the result.
    """
    width = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    words = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(width)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, len(words), _CHUNK):
        part = words[first : first + _CHUNK].to(torch.int64)
        total += (part * _weights(first, len(part), words.device)).sum()
    return int(total)


def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits for `count` positions, without a pattern: products and shifts mix the bits of the position."""
    mixed = torch.arange(first + 1, first + 1 + count, device=device) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> 30)) * _FACTORS[1]
    return (mixed ^ (mixed >> 27)) * 2 + 1
