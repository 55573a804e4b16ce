"""A mover for the CPU that really moves: what is read too early, too late or twice shows.

Contract: `Copying` keeps what left in memory of its own, and hands back new memory, which holds no numbers until the
value has arrived. It counts what is away, and refuses steps in another order than leave, free, start, arrive.
"""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from graphpp.compiler import assemble as assembly
from graphpp.runtime.offload import Mover
from graphpp.runtime.program import TensorMeta
from graphpp.runtime.strided_copies import meta_of, packed
from graphpp.runtime.transport import Landing


@dataclass
class Copy:
    meta: TensorMeta
    host: torch.Tensor
    landing: Landing | None = None
    at: str = "leaving"


class Copying:
    """Moves to other memory and back."""

    def __init__(self) -> None:
        self.moved = self.away = self.most = 0
        self.forgotten = False

    def leave(self, value: torch.Tensor) -> Copy:
        return Copy(meta_of(value), packed(value).clone())

    def free(self, moved: Copy) -> None:
        self._turn(moved, "leaving", "away")
        self.away += moved.host.nbytes
        self.most = max(self.most, self.away)

    def start(self, moved: Copy) -> None:
        self._turn(moved, "away", "coming")
        self.away -= moved.host.nbytes
        moved.landing = Landing.of(moved.meta, torch.device("cpu"))
        moved.landing.elements.fill_(float("nan") if moved.meta.dtype.is_floating_point else 1)

    def arrive(self, moved: Copy) -> torch.Tensor:
        self._turn(moved, "coming", "there")
        assert moved.landing is not None
        moved.landing.elements.copy_(moved.host)
        self.moved += 1
        return moved.landing.value()

    def forget(self) -> None:
        self.forgotten = True

    def _turn(self, moved: Copy, before: str, after: str) -> None:
        assert moved.at == before, f"{moved.at}, and should be {before}"
        moved.at = after


def moving_by(mover: Mover[Any]) -> Any:
    """Runners made meanwhile move values by this mover."""
    return patch.object(assembly, "mover_for", lambda device: mover)
