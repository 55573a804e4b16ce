"""The states of the random generators of Python, numpy and torch, which data collators use, as part of a checkpoint."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class RandomState:
    """The states of the random generators that data collators use; a load keeps them until `restore`."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state(legacy=True)
        numpy = (kind, torch.tensor(keys, dtype=torch.int64), *rest)  # torch cannot pickle uint32
        return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def restore(self) -> None:
        if self._loaded is not None:
            version, numbers, gauss = self._loaded["python"]
            random.setstate((version, tuple(numbers), gauss))
            kind, keys, *rest = self._loaded["numpy"]
            np.random.set_state((kind, keys.numpy(), *rest))
            torch.set_rng_state(self._loaded["torch"])


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """A context after which the generators of Python, numpy and torch, also of other devices, are as before."""
    states = RandomState()
    states.load_state_dict(states.state_dict())
    try:
        with torch.random.fork_rng():
            yield
    finally:
        states.restore()
