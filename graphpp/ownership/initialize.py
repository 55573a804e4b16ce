"""Run the code that initialises a model on a rank that has memory for only a part of it.

- `initialize` calls a function with every module in the order of `nn.Module.apply`. Other ranks' tensors get memory during a
  call (`lent_memory.py`), so the random generators advance as in a process with the whole model, and this rank's values are
  bit-equal to that process's.
- With a seed, each module's generators are seeded by the seed and its FQN, and modules without a tensor of this rank are
  skipped. Values then do not depend on split and ranks; the generators' states are restored.
- Code that reads another rank's tensor which an earlier call wrote raises `GraphPPError`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from graphpp.arguments import Accepted, callback
from graphpp.errors import GraphPPError
from graphpp.ownership.lent_memory import LentMemory
from graphpp.runtime.model_state import own_tensors

Initializer = Callable[[nn.Module], object]

_ANYTHING = Accepted("anything", lambda value: True)
_RESETS = ("reset_parameters", "_reset_parameters", "reset_buffers")


def reset(module: nn.Module) -> None:
    """Initialise a module as its constructor does, by the methods that torch's own modules have for this."""
    for name in _RESETS:
        method = getattr(module, name, None)
        if callable(method):
            method()


def initialize(
    model: nn.Module, init: Initializer, own: Collection[int], lent: LentMemory, seed: int | None, device: torch.device
) -> None:
    """Call `init` with the modules of `model`. `own`: `id`s of this rank's tensors; `lent` has the memory of all others."""
    holding = {id(each) for each in model.modules() if any(id(tensor) in own for _, tensor in _tensors_below(each))}
    with torch.no_grad(), lent, _generators_kept(seed, device):
        for fqn, module in _children_first(model, ""):
            if seed is not None:
                if id(module) not in holding:
                    continue
                for generator in default_generators(device):
                    generator.manual_seed(_seed_of(seed, fqn))
            name = f"init of {fqn or 'the model'} (a {type(module).__name__})"
            callback(GraphPPError, name, _ANYTHING, init)(module)
            lent.give_back()


def _tensors_below(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for each in module.modules():
        yield from own_tensors(each)


def _children_first(module: nn.Module, fqn: str) -> Iterator[tuple[str, nn.Module]]:
    """(FQN, module) in the order of `nn.Module.apply`: a module under two names comes twice."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{fqn}.{name}" if fqn else name)
    yield fqn, module


def _seed_of(seed: int, fqn: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {fqn}".encode()).digest()[:7], "little")


def default_generators(device: torch.device) -> list[torch.Generator]:
    """torch's default generators of the CPU and of `device`."""
    of_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *of_device]


@contextlib.contextmanager
def _generators_kept(seed: int | None, device: torch.device) -> Iterator[None]:
    """A context that restores the random generators if a seed is given."""
    states = [] if seed is None else [(each, each.get_state()) for each in default_generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
