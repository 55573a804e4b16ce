"""The position of torchdata's `StatefulDataLoader` is part of a checkpoint."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import graphpp
from tests.distributed import run_ranks

pytest.importorskip("torchdata.stateful_dataloader")
ROWS = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():  # torchdata calls a deprecated function of torch
        warnings.simplefilter("ignore")
        return StatefulDataLoader(TensorDataset(ROWS), batch_size=8, shuffle=True, num_workers=0)


def trained(rank: int, folder: Path, split: list[str], *, resume: bool) -> tuple[list[float], list[Tensor]]:
    """Two epochs of five batches; a checkpoint after the third batch, from which a resumed training goes on."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    example = graphpp.Microbatch((ROWS[:2],), target=ROWS[:2])
    pipe = graphpp.compile(model, F.mse_loss, example=example, split=split, schedule="GPipe", microbatches=4)
    optimizer, data = torch.optim.SGD(pipe.parameters(), lr=0.1), loader()
    checkpoint = pipe.checkpoint(optimizer, extra={"data": data})
    if resume:
        checkpoint.load(folder)
    losses, batches = [], []
    for _ in range(2):
        for (rows,) in islice(data, 5):
            losses.append(pipe.step(rows, target=rows.flip(1)).loss.item())
            batches.append(rows)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.steps == 3 and not resume:
                checkpoint.save(folder)
    return losses, batches


def test_a_data_loader_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = run_ranks(saved, 2, tmp_path / "run")[0]
    for losses, batches in [resumed(0, tmp_path / "run"), *run_ranks(resumed, 2, tmp_path / "run")]:
        assert losses == whole[0][3:]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(batches, whole[1][3:], strict=True))


def resumed(rank: int, folder: Path) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(7 + rank)
    return trained(rank, folder, ["2"], resume=True)


def saved(rank: int, folder: Path) -> tuple[list[float], list[Tensor]]:
    return trained(rank, folder, ["1"], resume=False)
