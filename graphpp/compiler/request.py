"""The request that a pipeline is compiled from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from graphpp.batch.batch_dims import BatchDims
from graphpp.capture.loss import LossFunction
from graphpp.options.options import Options
from graphpp.parallel.rank_place import RankPlace
from graphpp.passes.lower import Hook, PassResult


def ignore(passed: PassResult) -> None:
    """The hook that does nothing."""


@dataclass(frozen=True)
class CompileRequest:
    """A model, its loss (None: the model returns it), the options of `graphpp.compile`, and this rank's place.

    `watch` sees the captured graph (as pass "capture") and the result of each pass. `dumps`: whether `debug.dump` is written.
    `told`: warnings that are not repeated.
    """

    model: nn.Module
    loss: LossFunction | None
    options: Options
    place: RankPlace
    watch: Hook = ignore
    dumps: bool = True
    told: set[str] = field(default_factory=set, compare=False)

    @cached_property
    def batch_dims(self) -> BatchDims:
        return BatchDims.of(self.model, self.options.microbatches.batch_dims)
