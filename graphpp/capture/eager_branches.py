"""What a model is told when it asks whether it is being traced: no, so that the code of eager is what is captured.

Contract: models ask `torch.compiler.is_compiling()` and `is_exporting()` and then take other branches, for shapes that vary
or for a compiler: other kernels, other last bits. A capture has one set of shapes and wants eager's numbers. While
`answer_as_eager` is open the model's own code is answered False, torch's code the truth; `TracingQueries.any` says whether the
answer can have mattered.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch

from graphpp._torch import aot
from graphpp.capture.source_lines import is_user_file

_LOG = logging.getLogger(aot.FAKE_LOG)


@dataclass
class TracingQueries:
    """Whether the model's own code asked."""

    any: bool = False

    def answer_for(self, truth: Callable[[], bool]) -> Callable[[], bool]:
        """What to answer in place of `truth`."""

        def answer() -> bool:
            code = sys._getframe(1).f_code
            # TorchScript asks from C++, which has no frame of its own: code that asks by itself has the name in it.
            if not is_user_file(code.co_filename) or truth.__name__ not in (*code.co_names, *code.co_consts):
                return truth()
            self.any = True
            return False

        return answer


@contextlib.contextmanager
def answer_as_eager(queries: TracingQueries) -> Iterator[None]:
    """Trace what runs inside as if it ran in eager. Torch logs nothing: where it fails, something else is tried."""
    compiling, exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
    before = _LOG.level
    _LOG.setLevel(logging.CRITICAL)
    try:
        with (
            patch.object(torch.compiler, "is_compiling", queries.answer_for(compiling)),
            patch.object(torch.compiler, "is_exporting", queries.answer_for(exporting)),
        ):
            yield
    finally:
        _LOG.setLevel(before)
