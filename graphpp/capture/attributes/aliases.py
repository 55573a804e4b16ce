"""Refuse tensors that share memory with a tensor that the graph reads or writes under another name.

Contract: `CaptureError` is raised for a constant in the memory of a non-parameter that requires grad, and for a written buffer
that shares memory with another tensor of the model. Memory is compared by address, so aliases on the meta device are not found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from graphpp._torch import aot
from graphpp._torch.parallel.sharded_tensor import local_of
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.program import BufferUpdate


def refuse_foreign_leaves(constants: Iterable[torch.Tensor]) -> None:
    """Raise `CaptureError` for a constant in the memory of a tensor that requires grad and is no parameter."""
    addresses = {tensor.data_ptr() for tensor in constants if tensor.is_floating_point() and tensor.numel()}
    for leaf in gc.get_objects() if addresses else ():
        plain = type(leaf) in (torch.Tensor, nn.Parameter)
        own = leaf if plain else local_of(leaf) if issubclass(type(leaf), torch.Tensor) else None  # a DTensor's shard
        if own is not None and not aot.is_fake(own) and leaf.requires_grad and _memory(own)[0] in addresses:
            raise CaptureError(
                f"the model or the loss reads a tensor of shape {list(leaf.shape)} that requires grad and is no parameter of "
                "the model: it would get no gradient. Assign it to a module as an nn.Parameter (not within a list or dict)."
            )


def refuse_written_aliases(model: nn.Module, joint: JointGraph) -> None:
    """Raise `CaptureError` if the forward writes a buffer that shares memory with another tensor of the model."""
    written = {role.fqn for role, _ in joint.outputs() if isinstance(role, BufferUpdate)}
    registered: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {**registered, **{f"the constant {name}": tensor for name, tensor in joint.constants.items()}}
    for fqn in sorted(written & registered.keys()):
        tensor = registered[fqn]
        alias = next((name for name, other in others.items() if other is not tensor and _overlap(tensor, other)), None)
        if alias is not None:
            raise CaptureError(
                f"the forward writes the buffer {fqn}, and {alias} is a view of the same memory: the graph would read the old "
                "values there. Register one of the two, and make the view in the forward."
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (start, end), (first, last) = _memory(one), _memory(other)
    return start < last and first < end


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and after its last, gaps included; (0, 0) without strided memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0, 0
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a functorch tensor has no memory
        return 0, 0
    return (start, start + reach * tensor.element_size()) if start else (0, 0)  # a DTensor's `data_ptr` is 0
