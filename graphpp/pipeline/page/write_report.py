"""Make the page of a pipeline and write it, on the one rank that writes.

Contract: every rank of all replicas calls this. The first rank of them all writes `report.html`; the others return its path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from graphpp.compiler.request import CompileRequest
from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import RankPlace
from graphpp.pipeline.graph_cache import GraphCache
from graphpp.pipeline.page.fill_page import page_of
from graphpp.pipeline.profile import Profile
from graphpp.report.page_html import write_page
from graphpp.report.run_view import RunView

_FILE = "report.html"


def write_report(
    folder: Path, request: CompileRequest, cache: GraphCache, profile: Profile | None, run: Callable[[], RunView]
) -> Path:
    """Write the page into the folder, which is made where it lacks; returns the page's path. `run` reads the run so far."""
    first, so_far = cache.captured(), run()
    if folder.exists() and not folder.is_dir():
        raise GraphPPError(f"folder: {folder} is a file: give a folder, into which {_FILE} is written")
    if _writes(request.place):
        write_page(page_of(request, first, cache.tables, profile, so_far), folder / _FILE)
    return folder / _FILE


def _writes(place: RankPlace) -> bool:
    return place.everyone is None or dist.get_rank(place.everyone) == 0
