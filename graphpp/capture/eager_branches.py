"""Capture the branches that a model takes in eager: tell the model that it is not being traced.

Contract: some models ask `torch.compiler.is_compiling()` or `is_exporting()` and take another branch for varying shapes or
for a compiler, with other kernels and other last bits. A capture has one set of shapes and must have eager's numbers. While
`answer_as_eager` is open, the model's own code gets False and torch's code gets the true answer. `TracingQueries.any` tells
whether the model's own code has asked at all.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from graphpp._torch import aot
from graphpp._torch.this_thread import caller, replaced
from graphpp.capture.source_lines import is_user_file

_LOG = logging.getLogger(aot.FAKE_LOG)


@dataclass
class TracingQueries:
    """Answers `is_compiling()` and `is_exporting()`; `any` becomes True when the model's own code asks."""

    any: bool = False

    def answer_for(self, truth: Callable[[], bool]) -> Callable[[], bool]:
        """A function to replace `truth`: False for the model's own code, the truth for torch."""

        def answer() -> bool:
            code = caller()
            # TorchScript asks from C++ without a Python frame; code that asks by itself has the function's name in it.
            if not is_user_file(code.co_filename) or truth.__name__ not in (*code.co_names, *code.co_consts):
                return truth()
            self.any = True
            return False

        return answer


@contextlib.contextmanager
def answer_as_eager(queries: TracingQueries) -> Iterator[None]:
    """Answer the model as in eager. Torch logs no failures meanwhile, because `trace.py` then traces without this."""
    compiling, exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
    before = _LOG.level
    _LOG.setLevel(logging.CRITICAL)
    try:
        with (
            replaced(torch.compiler, "is_compiling", queries.answer_for(compiling)),
            replaced(torch.compiler, "is_exporting", queries.answer_for(exporting)),
        ):
            yield
    finally:
        _LOG.setLevel(before)
