"""Reads the arguments of a call as microbatches.

Contract: a whole batch is cut into the number of microbatches of the options and the schedule; microbatches given one by one
stay unchanged. Raises `BatchError` for arguments that are no batch, and for a target that nothing reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from graphpp.arguments import one_of, require
from graphpp.batch.cut_batch import BY_NAME, BatchCutter
from graphpp.batch.microbatch import FlatMicrobatch, Microbatch, flatten_microbatch
from graphpp.capture.loss import takes_target
from graphpp.compiler.request import CompileRequest
from graphpp.errors import BatchError
from graphpp.log import logger
from graphpp.planner.microbatch_count import microbatches_for

_LOG = logger(__name__)
_MICROBATCHES = one_of(list, tuple, takes="a list of graphpp.Microbatch")


@dataclass(frozen=True)
class OneByOne:
    """Microbatches that the caller gave one by one; unchecked."""

    microbatches: object


Batch = Microbatch | OneByOne


class BatchReader:
    """Reads the batches of one pipeline. `admits(count)`: whether the schedule has a table for `count` microbatches."""

    def __init__(self, request: CompileRequest, example: Microbatch | None, admits: Callable[[int], bool]) -> None:
        self._loss, self._options, self._ranks = request.loss, request.options, request.place.ranks
        self._admits, self._dims, self._cutter = admits, request.batch_dims, BatchCutter(example, request.batch_dims)
        self._reads_target = self._loss is not None and takes_target(self._loss)
        self._told: set[str] | None = set() if request.place.rank == 0 else None  # the cuts of which the log has a line

    def microbatches(self, batch: Batch, *, training: bool = True) -> list[FlatMicrobatch]:
        if isinstance(batch, OneByOne):
            parts = [self._dims.with_rows(part) for part in _flattened(batch.microbatches)]
        elif training or batch.args or batch.kwargs or batch.target is not None:
            flat = FlatMicrobatch.of(batch)
            count = microbatches_for(self._options, self._ranks, self._cutter.rows(flat), self._admits)
            parts = self._cutter.cut(flat, count)
            self._tell(f"a batch is {self.describe()}")
        else:
            raise BatchError("pipe.eval runs a batch: pipe.eval(x). To switch the flags of the model, call model.eval()")
        if not self._reads_target and any(map(_has_target, parts)):
            own = "with loss=None the model's output brings its own loss"
            reason = own if self._loss is None else "the loss takes no second positional argument"
            raise BatchError(
                f"a target was given, but {reason} and nothing reads the target. Pass a loss(output, target) to "
                "graphpp.compile, or give the target as an argument of the model."
            )
        if self._loss is None and any(path.startswith("loss_kwargs") for part in parts for path in part.paths):
            raise BatchError("loss_kwargs were given, and with loss=None nothing reads them: pass a loss to graphpp.compile")
        return parts

    def _tell(self, cut: str) -> None:
        """Log each new way to cut a batch once: a warning if only the size of a first dimension has decided about a tensor."""
        if self._told is not None and cut not in self._told and self.describe():
            self._told.add(cut)
            guess = f", as their first dimensions have another size. Say so by {BY_NAME} or graphpp.whole."
            _LOG.log(logging.WARNING if self._cutter.guesses else logging.INFO, f"{cut}{guess * self._cutter.guesses}")

    def describe(self) -> str:
        return self._cutter.describe()


def _flattened(microbatches: object) -> list[FlatMicrobatch]:
    require(BatchError, "microbatches", _MICROBATCHES, microbatches)
    if not microbatches:
        raise BatchError("a step needs at least one microbatch, got an empty list")
    return [flatten_microbatch(part) for part in microbatches]  # type: ignore[attr-defined]


def _has_target(part: FlatMicrobatch) -> bool:
    pairs = zip(part.paths, part.values, strict=True)
    return any(value is not None for path, value in pairs if path.startswith("target"))
