"""Copy the tensors of a checkpoint into the host's memory, so that the training may go on while they are written."""

from __future__ import annotations

from typing import Any

import torch

from graphpp._torch.pytree import tree_flatten, tree_unflatten


def host_copies(entries: dict[str, Any]) -> dict[str, Any]:
    """`entries` with every tensor copied into the host's memory, a tensor of several entries once.

    Copies from a GPU go into pinned memory, all of them at once. All copies are complete on return.
    """
    leaves, structure = tree_flatten(entries)
    tensors = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    copies = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=tensor.is_cuda)
        for key, tensor in tensors.items()
    }
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    staged: dict[str, Any] = tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], structure)
    return staged
