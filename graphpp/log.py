"""The loggers of graphpp: one for each module, below `logging.getLogger("graphpp")`.

Contract: a record has the attribute `rank`, this process's rank in the job, or None outside a job. graphpp adds no handler and
sets no level, so Python prints warnings and errors to stderr until the program configures logging.
"""

from __future__ import annotations

import logging
import os
import sys


def logger(module: str) -> logging.Logger:
    """The logger of a module (`__name__`), whose records have the rank."""
    found = logging.getLogger(module)
    found.addFilter(_add_rank)
    return found


def _add_rank(record: logging.LogRecord) -> bool:
    """Let the record pass, with its rank; a program's own record factory may have set one."""
    distributed = sys.modules.get("torch.distributed")  # `import graphpp` does not load torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank: int | None = distributed.get_rank()
    else:
        rank = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None
    record.__dict__.setdefault("rank", rank)
    return True
