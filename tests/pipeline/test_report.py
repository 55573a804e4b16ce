"""`pipe.report`: a page of what was compiled, profiled and trained, written by one rank, the same numbers as elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.errors import GraphPPError
from graphpp.pipeline.report_page import page_of
from graphpp.report.page import Page
from graphpp.report.page_html import page_html
from graphpp.report.run_view import RunView
from tests.distributed import run_ranks


class Skipping(nn.Module):
    """The first layer's output is joined to the third one's, in the stage of the third, and nobody between reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        h = torch.relu(self.third(torch.relu(self.second(x))))
        return self.last(torch.cat([early, h], 1))


def skipping(**options: Any) -> graphpp.Pipeline:
    sample = graphpp.Microbatch(torch.ones(2, 16), target=torch.ones(2, 16))
    given = {"split": ["second", "third", "last"], "microbatches": 4, "example": sample, **options}
    return graphpp.compile(Skipping(), nn.functional.mse_loss, **given)


def page(pipe: graphpp.Pipeline, profile: graphpp.Profile | None = None) -> Page:
    return page_of(pipe._request, pipe._cache.captured(), pipe._cache.tables, profile, RunView())


def test_the_page_has_the_numbers_of_the_plan() -> None:
    pipe = skipping(schedule="1F1B")
    found = page(pipe)
    assert [each.modules for each in found.stages] == [each.modules for each in pipe.plan.stages]
    assert pipe.plan.memory is not None and found.memory is not None
    assert [each.together for each in found.memory.ranks] == [each.peak for each in pipe.plan.memory.ranks]
    assert [each.forward_bytes for each in found.boundaries] == [each.sent_forward_bytes for each in pipe.plan.stages[:-1]]
    assert [each.backward_bytes for each in found.boundaries] == [each.sent_backward_bytes for each in pipe.plan.stages[1:]]
    (timeline,) = found.timelines
    assert timeline.makespan > 0 and "estimated" in timeline.note
    assert found.memory.over_time and [each.cap for each in found.memory.ranks] == [None]


def test_a_skip_connection_is_a_relay_with_its_bytes() -> None:
    found = page(skipping(schedule="GPipe"))
    forward = [each for each in found.relays if each.way == "forward"]
    skip = next(each for each in forward if each.value.maker.startswith("first"))
    assert (skip.source, skip.target, skip.unused) == (0, 2, (1,))
    assert skip.value.nbytes == 2 * 16 * 4 and skip.nbytes == 2 * skip.value.nbytes
    crossed = [skip.value.name in [value.name for value in each.forward] for each in found.boundaries]
    assert crossed == [True, True, False]
    assert [each.relayed_bytes >= skip.value.nbytes for each in found.boundaries] == crossed
    back = next(each for each in found.relays if each.way == "backward")
    assert (back.source, back.target, back.unused) == (2, 0, (1,))


def test_the_cap_stands_beside_the_bytes() -> None:
    found = page(skipping(schedule="1F1B", memory=graphpp.Memory(cap=10**9)))
    assert found.memory is not None and [each.cap for each in found.memory.ranks] == [10**9]


def test_a_profile_stands_below_the_simulated_step() -> None:
    pipe = skipping(schedule="1F1B")
    batch = torch.ones(8, 16)
    profile = pipe.profile(batch, target=batch, repeat=1)
    found = page(pipe, profile)
    assert [each.name for each in found.timelines] == ["simulated", "measured"]
    assert found.timelines[1].makespan == profile.timeline.makespan
    assert "pipe.profile" in found.timelines[0].note
    with pytest.raises(GraphPPError, match="which this pipeline does not run"):
        page(skipping(schedule="GPipe", split=["third"]), profile)
    with pytest.raises(GraphPPError, match="which this pipeline does not run"):
        page(skipping(schedule="GPipe"), profile)


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    pipe = skipping(schedule="1F1B")
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphPPError, match="is a file: give a folder"):
        pipe.report(tmp_path / "file")
    with pytest.raises(GraphPPError, match=r"profile: take a graphpp\.Profile"):
        pipe.report(tmp_path, profile=pipe.plan)  # type: ignore[arg-type]
    with pytest.raises(GraphPPError, match="folder: take a path"):
        pipe.report(3)  # type: ignore[arg-type]
    with pytest.raises(GraphPPError, match="nothing is captured yet"):
        skipping(schedule="1F1B", example=None).report(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def on_a_mesh(rank: int, folder: str, shape: tuple[int, ...], names: tuple[str, ...], keep: int | None) -> tuple[str, bool]:
    """The path of the page, and whether its memory has the peaks of the plan."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    pipe = skipping(schedule="Interleaved1F1B", mesh=mesh, parallel=graphpp.Parallel(keep=keep))
    found, memory = page(pipe), pipe.plan.memory
    assert found.memory is not None and memory is not None
    return str(pipe.report(folder)), [each.together for each in found.memory.ranks] == [each.peak for each in memory.ranks]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("shape", "names", "keep"),
    [
        ((2, 1), ("pp", "dp_shard"), None),
        ((1, 2), ("pp", "dp_shard"), 1),
        ((1, 2), ("pp", "dp_shard"), 0),
        ((1, 2), ("pp", "dp_replicate"), None),
    ],
    ids=["pipeline", "shards", "layers", "replicas"],
)
def test_ranks_of_a_mesh_write_one_page(
    tmp_path: Path, shape: tuple[int, ...], names: tuple[str, ...], keep: int | None
) -> None:
    both = run_ranks(on_a_mesh, 2, str(tmp_path), shape, names, keep)
    assert both[0] == both[1] == (str(tmp_path / "report.html"), True)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "DualPipeV", "split": ["third"]},
        {"schedule": "ZBVZeroBubble", "split": ["third"], "memory": "full"},
        {"schedule": "GPipe", "debug": graphpp.Debug(dynamic=True)},
    ],
    ids=["overlaps", "recomputed", "sizes"],
)
def test_the_memory_of_the_page_has_the_peaks_of_the_plan(options: dict[str, Any]) -> None:
    pipe = skipping(**options)
    found, memory = page(pipe), pipe.plan.memory
    assert found.memory is not None and memory is not None
    assert [each.together for each in found.memory.ranks] == [each.peak for each in memory.ranks]
    assert page_html(found)
