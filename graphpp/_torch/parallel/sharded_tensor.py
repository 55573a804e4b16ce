"""The names of `torch.distributed.tensor`, which is imported when the first `DTensor` is made: `import graphpp` stays fast.

Private names, checked on torch 2.13.0 and 2.15.0:

- `DTensor._local_tensor`: the local shard; unlike `to_local`, reading it makes no autograd node, and it may be set
- `DTensor._spec` and `DTensor(local, spec, requires_grad=)`: a tensor with another tensor's placements whose shard may be on
  another device; `DTensor.from_local` would move it
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MODULE = "torch.distributed.tensor"


def is_dtensor(tensor: object) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of the tensors is a `DTensor`; checks each class once."""
    return not any(map(is_dtensor_class, set(map(type, tensors))))


def is_dtensor_class(kind: type) -> bool:
    """Whether a class is `DTensor` or a subclass."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(kind, module.DTensor)


def is_placement(value: object) -> bool:
    """Whether a value is a placement of a `DTensor`."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.placement_types.Placement)


def _attribute(tensor: torch.Tensor, name: str) -> Any:
    return getattr(tensor, name) if is_dtensor(tensor) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A `DTensor`'s local shard; None for another tensor."""
    found: torch.Tensor | None = _attribute(tensor, "_local_tensor")
    return found


class Spread(NamedTuple):
    """A `DTensor`'s mesh and placements, and its global shape and strides."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """The mesh, placements, shape and strides of a `DTensor`; None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    sharded: Any = tensor
    return Spread(sharded.device_mesh, tuple(sharded.placements), sharded.shape, sharded.stride())


def as_dtensor(local: torch.Tensor, spread: Spread) -> Any:
    """A `DTensor` with the local shard `local`; gradients flow back to `local`, with the placements of `spread`."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = spread
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def dtensor_of(local: torch.Tensor, spread: Spread) -> Any:
    """A `DTensor` whose local shard is the very tensor `local`."""
    return lying_at(as_dtensor(local.as_strided(local.shape, local.stride(), 0), spread), local)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The full values of a `DTensor`, all-gathered over one mesh dimension after another; a plain tensor unchanged."""
    spread = spread_of(tensor)
    if spread is None:
        return tensor
    from torch.distributed.tensor import Replicate

    whole: Any = tensor
    for at in reversed(range(spread.mesh.ndim)):
        placements = [*spread.placements[:at], *[Replicate()] * (spread.mesh.ndim - at)]
        whole = whole.redistribute(placements=placements)
    found: torch.Tensor = whole.to_local()
    return found


def part_of_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """A `DTensor`'s local shard, differentiable; a plain tensor unchanged."""
    found: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return found


def placed_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """Redistribute `tensor` to the placements of `like`; None if only one of them is a `DTensor`."""
    if is_dtensor(tensor) != is_dtensor(like):
        return None
    found: Any = tensor
    return found.redistribute(placements=_attribute(like, "placements")) if is_dtensor(like) else found  # type: ignore[no-any-return]


def sharded_by_rows(mesh: DeviceMesh, shape: Sequence[int], stride: Sequence[int], before: Sequence[Any] = ()) -> Spread:
    """Shard rows over the last dimension of `mesh`; `before`: placements over the other dimensions (none: replicated)."""
    from torch.distributed.tensor import Replicate, Shard

    others = before or [Replicate()] * (mesh.ndim - 1)
    return Spread(mesh, (*others, Shard(0) if len(shape) else Replicate()), torch.Size(shape), tuple(stride))


def parameter_of(sharded: Any, *, requires_grad: bool) -> nn.Parameter:
    """A `DTensor` parameter with the same local shard."""
    local = sharded._local_tensor
    begin = lying_at(sharded, local.as_strided(local.shape, local.stride(), 0))  # `nn.Parameter` makes a new `DTensor`
    made: nn.Parameter = lying_at(nn.Parameter(begin, requires_grad=requires_grad), local)
    return made


def lying_at(made: Any, local: torch.Tensor) -> Any:
    """Set the shard of `made`. (A `DTensor` made from a view inherits the view's offset, and `copy.deepcopy` fails.)"""
    made._local_tensor = local
    return made


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A `DTensor` of shard `local` with the shape and placements of `tensor`; `local` if `tensor` is no `DTensor`."""
    if not is_dtensor(tensor):
        return local
    kind: Any = sys.modules[_MODULE].DTensor
    made: torch.Tensor = kind(local, _attribute(tensor, "_spec"), requires_grad=False)
    return made
