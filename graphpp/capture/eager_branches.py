"""Capture the branches that a model takes in eager mode.

Contract: some models branch on `torch.compiler.is_compiling()` or `is_exporting()`, and the compiler's branch may use other
kernels, which round differently. While `as_eager_first` traces, the model's own code gets False, torch's code the true answer.
If these branches cannot be traced and the model's code has asked, the model is traced with the true answers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from graphpp._torch import aot
from graphpp._torch.this_thread import caller, replaced
from graphpp.capture.source_lines import is_user_file
from graphpp.errors import CaptureError

T = TypeVar("T")
Answering = Callable[[], contextlib.AbstractContextManager[None]]
_LOG = logging.getLogger(aot.FAKE_LOG)


def as_eager_first(trace: Callable[[Answering], T], otherwise: Answering) -> T:
    """The result of `trace(answering)` with eager's branches or, if they cannot be traced, within `otherwise`."""
    queries = _Queries()
    try:
        return trace(lambda: _answer_as_eager(queries))
    except CaptureError:
        if not queries.any:
            raise
    return trace(otherwise)


@dataclass
class _Queries:
    """Answers `is_compiling()` and `is_exporting()`; `any`: whether the model's own code has asked."""

    any: bool = False

    def answer_for(self, truth: Callable[[], bool]) -> Callable[[], bool]:
        """A replacement for `truth`: False for the model's own code, `truth` for torch."""

        def answer() -> bool:
            code = caller()
            # TorchScript asks from C++ without a Python frame. Python code that asks has the function's name in it.
            if not is_user_file(code.co_filename) or truth.__name__ not in (*code.co_names, *code.co_consts):
                return truth()
            self.any = True
            return False

        return answer


@contextlib.contextmanager
def _answer_as_eager(queries: _Queries) -> Iterator[None]:
    """Answer the model as in eager, and disable torch's log of failures, since another trace may follow."""
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
