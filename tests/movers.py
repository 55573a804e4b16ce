"""A mover for the CPU that really copies: reading an offloaded value too early, too late or twice fails.

Contract: `CopyingMover` keeps evicted values in memory of its own, and restores them into new memory, which holds no numbers
until `restore`. It counts the evicted bytes, and asserts the order evict, free, prefetch, restore.
"""

from dataclasses import dataclass
from typing import Any

import torch

from graphpp.runtime.messages.wire_layout import ReceiveBuffer, elements_of, layout_of, meta_of
from graphpp.runtime.program import TensorMeta
from tests import internals


@dataclass
class Copy:
    meta: TensorMeta
    host: torch.Tensor
    buffer: ReceiveBuffer | None = None
    state: str = "evicting"


class CopyingMover:
    """Copies to other memory and back. `moved`: values restored; `evicted`, `most`: bytes evicted now, and at most."""

    def __init__(self) -> None:
        self.moved = self.evicted = self.most = 0
        self.abandoned = False

    def evict(self, value: torch.Tensor) -> Copy:
        return Copy(meta_of(value), elements_of(value).clone())

    def free(self, copy: Copy) -> None:
        self._advance(copy, "evicting", "evicted")
        self.evicted += copy.host.nbytes
        self.most = max(self.most, self.evicted)

    def prefetch(self, copy: Copy) -> None:
        self._advance(copy, "evicted", "prefetching")
        self.evicted -= copy.host.nbytes
        copy.buffer = layout_of(copy.meta).buffer(torch.device("cpu"))
        copy.buffer.elements.fill_(float("nan") if copy.meta.dtype.is_floating_point else 1)

    def restore(self, copy: Copy) -> torch.Tensor:
        self._advance(copy, "prefetching", "restored")
        assert copy.buffer is not None
        copy.buffer.elements.copy_(copy.host)
        self.moved += 1
        return copy.buffer.value()

    def abandon(self) -> None:
        self.abandoned = True

    def _advance(self, copy: Copy, before: str, after: str) -> None:
        assert copy.state == before, f"{copy.state}, and should be {before}"
        copy.state = after


def moving_by(mover: Any) -> Any:
    """A context in which new runners offload by this mover."""
    return internals.offloading_by(mover)
