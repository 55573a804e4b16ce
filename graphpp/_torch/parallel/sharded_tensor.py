"""The names of `torch.distributed.tensor` that tell sharded tensors apart, and its private ones.

Importing torch's package takes time that `import graphpp` must not cost, so it is imported when the first sharded tensor is
made.

Checked on torch 2.13.0 and 2.15.0:

- `DTensor._local_tensor`: the rank's part, without the autograd node that `to_local` makes; may be set
- `DTensor._spec` and `DTensor(local, spec, requires_grad=)`: a tensor with the placements of another one, whose local part may
  be on another device; `DTensor.from_local` would move it
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
    """Whether a value is a `DTensor`."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of many tensors is a `DTensor`; asks once for each class of tensors."""
    return not any(map(is_dtensor_class, set(map(type, tensors))))


def is_dtensor_class(kind: type) -> bool:
    """Whether a class is `DTensor`, or a class of `DTensor`s."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(kind, module.DTensor)


def is_placement(value: object) -> bool:
    """Whether a value says how a dimension of a `DTensor`'s mesh holds the tensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.placement_types.Placement)


def _attribute(tensor: torch.Tensor, name: str) -> Any:
    return getattr(tensor, name) if is_dtensor(tensor) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A `DTensor`'s part on this rank; None for another tensor."""
    found: torch.Tensor | None = _attribute(tensor, "_local_tensor")
    return found


class Spread(NamedTuple):
    """How a `DTensor` is spread over ranks: its mesh, its placements, its whole shape and strides."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """How a tensor is spread over ranks; None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    sharded: Any = tensor
    return Spread(sharded.device_mesh, tuple(sharded.placements), sharded.shape, sharded.stride())


def as_dtensor(local: torch.Tensor, spread: Spread) -> Any:
    """A `DTensor` made of this rank's part; gradients pass to `local`, with the placements of `spread`."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = spread
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def dtensor_of(local: torch.Tensor, spread: Spread) -> Any:
    """A `DTensor` of which this rank's part is `local`."""
    return lying_at(as_dtensor(local.as_strided(local.shape, local.stride(), 0), spread), local)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole values of a `DTensor`, gathered over one dimension of its mesh after the other; a plain tensor itself."""
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
    """This rank's part of a `DTensor`, with its gradient; a plain tensor itself."""
    found: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return found


def placed_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """The values of `tensor` with the placements of `like`; None if one of them is a `DTensor` and the other is not."""
    if is_dtensor(tensor) != is_dtensor(like):
        return None
    found: Any = tensor
    return found.redistribute(placements=_attribute(like, "placements")) if is_dtensor(like) else found  # type: ignore[no-any-return]


def sharded_by_rows(mesh: DeviceMesh, shape: Sequence[int], stride: Sequence[int], before: Sequence[Any] = ()) -> Spread:
    """How a tensor is spread whose rows are cut over the last dimension of `mesh`; one of no dimension is replicated.

    `before`: its placements over the other dimensions of `mesh`, which cut first (none: replicated).
    """
    from torch.distributed.tensor import Replicate, Shard

    others = before or [Replicate()] * (mesh.ndim - 1)
    return Spread(mesh, (*others, Shard(0) if len(shape) else Replicate()), torch.Size(shape), tuple(stride))


def parameter_of(sharded: Any, *, requires_grad: bool) -> nn.Parameter:
    """A parameter that is a `DTensor`, with the same part on this rank."""
    local = sharded._local_tensor
    begin = lying_at(sharded, local.as_strided(local.shape, local.stride(), 0))  # a parameter is made of it anew
    made: nn.Parameter = lying_at(nn.Parameter(begin, requires_grad=requires_grad), local)
    return made


def lying_at(made: Any, local: torch.Tensor) -> Any:
    """The `DTensor` with `local` as its part.

    A `DTensor` that is made of a part within a larger memory takes the part's offset for its own, and `copy.deepcopy` fails.
    """
    made._local_tensor = local
    return made


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, as the part of a `DTensor` with the shape and placements of `tensor`; `local` itself if that is none."""
    if not is_dtensor(tensor):
        return local
    kind: Any = sys.modules[_MODULE].DTensor
    made: torch.Tensor = kind(local, _attribute(tensor, "_spec"), requires_grad=False)
    return made
