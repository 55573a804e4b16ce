"""One call of a pipeline: its microbatches, and the key under which the graph of each is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphpp.batch.loss_weights import LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch


@dataclass(frozen=True, eq=True)
class GraphKey:
    """The facts that a captured graph depends on: mode, signature of the microbatch, flags of the modules and autocast.

    A key is large and looked up for every microbatch, so its hash is computed once.
    """

    training: bool
    signature: tuple[str, ...]
    around: tuple[Any, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.training, self.signature, self.around))

    def __hash__(self) -> int:
        return self._hash

    def difference(self, before: GraphKey) -> str:
        """Why a graph captured under `before` does not serve, in words."""
        if before.training != self.training:
            return "training and evaluation took turns"
        pairs = zip(self.signature, before.signature, strict=False)
        return next((f"it had {new}, after {old}" for new, old in pairs if new != old), "an attribute of the model changed")


class KeysOfCall(tuple[GraphKey, ...]):
    """The keys of a call's microbatches in order; looked up several times, so the hash is computed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class StepCall:
    """One call of every rank: its microbatches, their keys, and the weights of their losses.

    Microbatches with equal keys are served by one captured graph.
    """

    parts: Sequence[FlatMicrobatch]
    training: bool
    keys: KeysOfCall
    weighting: LossWeighting

    @property
    def distinct(self) -> dict[GraphKey, FlatMicrobatch]:
        """The first microbatch of each key."""
        first: dict[GraphKey, FlatMicrobatch] = {}
        for key, part in zip(self.keys, self.parts, strict=True):
            first.setdefault(key, part)
        return first

    def shapes(self) -> list[str]:
        """The number of microbatches, and the shapes of the tensors of each kind: lines that ranks compare."""
        tensors = (pair for part in self.distinct.values() for pair in part.tensors.items())
        return [f"{len(self.parts)} microbatches", *(f"{path}: {list(each.shape)}" for path, each in tensors)]

    def describe(self) -> list[str]:
        """The microbatches of each kind, and the signature of the kind: lines that ranks compare."""
        kinds = self.distinct
        alike = [", ".join(str(index) for index, key in enumerate(self.keys) if key == kind) for kind in kinds]
        first = "microbatches of one shape" if len(kinds) == 1 else f"microbatches of {len(kinds)} shapes: {' | '.join(alike)}"
        return [first, *(line for part in kinds.values() for line in part.signature)]
