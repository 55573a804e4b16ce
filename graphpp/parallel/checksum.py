"""Checksums by which ranks compare tensors without sending them."""

from __future__ import annotations

import ctypes
import hashlib

import torch

_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # odd, with set bits everywhere
_CHUNK = 2**18  # elements per iteration, which needs several temporary int64 tensors
_SAMPLE = 256  # elements, about


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit integer that depends on bits and order. Computed on the tensor's device, with one wait for the result."""
    width = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    words = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(width)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, len(words), _CHUNK):
        part = words[first : first + _CHUNK].to(torch.int64)
        total += (part * _weights(first, len(part), words.device)).sum()
    return int(total)


def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random 64-bit numbers for `count` positions: products and shifts mix the bits of the position."""
    mixed = torch.arange(first + 1, first + 1 + count, device=device) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> 30)) * _FACTORS[1]
    return (mixed ^ (mixed >> 27)) * 2 + 1


def checksum_of_sample(tensor: torch.Tensor) -> int:
    """A hash of about 256 elements of a CPU tensor, spread evenly over all dimensions."""
    count = max(2, round(_SAMPLE ** (1 / max(tensor.dim(), 1))))
    part = tensor[tuple([slice(None, None, max(1, size // count)) for size in tensor.shape])]
    elements = part.detach().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(elements.data_ptr(), elements.nbytes)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
