"""Random operators whose numbers depend on a key alone, so that every rank, order and repetition draws the same numbers.

- `seeded(key, index, operator, ...)` runs a random operator with a generator state made from (key, index), and restores the
  generator afterwards. `key` belongs to the microbatch, `index` to the operator.
- Per step every rank draws one number from its default CPU generator; rank 0's number is broadcast, and the microbatches' keys
  are derived from it. So the caller's generator advances by one draw per step, and its saved state is enough to repeat a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from graphpp.parallel.rank_tree import RankTree

_MASK = (1 << 63) - 1


def mix(*numbers: int) -> int:
    """A well-spread 63-bit number from several (splitmix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def step_keys(microbatches: int, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """One key per microbatch, equal on every rank of the group."""
    drawn = torch.randint(_MASK, ())
    if group is not None:
        tree = RankTree.over(group)  # on gloo, if available: reading the number from a GPU would make the host wait
        drawn = drawn if tree.on_gloo else drawn.to(device)
        tree.broadcast(drawn, 0)
    return [mix(int(drawn), microbatch) for microbatch in range(microbatches)]


def seeded(key: int, index: int, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    generator = _generator(_device(args, kwargs))
    state = generator.get_state()
    generator.manual_seed(mix(key, index))
    try:
        return operator(*args, **kwargs)
    finally:
        generator.set_state(state)


def dropout_mask(key: int, index: int, like: Mapping[str, Any], probability: float) -> torch.Tensor:
    """The bool mask of kept elements, drawn by `aten.native_dropout`, with the shape and strides in `like`."""
    blank = torch.empty_strided(**like).zero_()
    mask: torch.Tensor = seeded(key, index, torch.ops.aten.native_dropout.default, blank, probability, True)[1]
    return mask


def _device(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.device:
    """The device whose generator an operator uses: of its first tensor argument, else its `device`, else the CPU."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
