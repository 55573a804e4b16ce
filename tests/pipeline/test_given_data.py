"""Ranks that were given other data are named in the same call; a rank needs only the data that its stages read."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import graphpp
from graphpp.parallel.checksum import checksum, checksum_of_sample
from tests.distributed import run_ranks
from tests.exhaustive import further

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
ROWS = 8


class Masked(nn.Module):
    """A model of which every layer reads a second argument, and none reads the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, unused: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask
        return x


def compiled(ranks: int, **options: Any) -> tuple[nn.Module, graphpp.Pipeline]:
    torch.set_num_threads(1)
    model = Masked()
    example = graphpp.Microbatch((X[:4], Y[:4] > 0), {"unused": Y[:4]}, Y[:4])
    split = [f"layers.{index}" for index in range(1, ranks)]
    return model, graphpp.compile(model, F.mse_loss, split=split, microbatches=2, example=example, **options)


def batch(at: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = slice(at * ROWS, (at + 1) * ROWS)
    return X[rows], Y[rows] > 0, Y[rows]


def outcome(call: Any) -> str:
    try:
        return str(call())
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"


def behind(rank: int, ranks: int, late: int, kind: str, options: dict[str, Any]) -> list[str]:
    """Six calls; from the call `late` on the last rank is given other data."""
    _, pipe = compiled(ranks, parallel=graphpp.Parallel(**options))
    found = []
    for at in range(6):
        odd = rank == ranks - 1 and at >= late
        x, mask, y = batch(at - 1 if odd and kind == "one step behind" else at)
        if odd and kind == "shuffled":
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
            x, mask, y = x[order], mask[order], y[order]
        if odd and kind == "another target":
            y = y + 1e-6
        found.append(outcome(lambda each=(x, mask, y): pipe.step(each[0], each[1], unused=each[2], target=each[2]).loss))
    return found


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("late", [1, *further(4)], ids=["in the first calls", "later"])
@pytest.mark.parametrize("kind", ["one step behind", "shuffled", "another target"])
def test_a_rank_with_other_data_is_named_on_all_ranks_in_that_call(kind: str, late: int) -> None:
    for found in run_ranks(behind, 3, 3, late, kind, {}):
        assert all(each.startswith("tensor") for each in found[:late])
        assert all("rank 2 differs in the values of" in each for each in found[late:]), found[late]
        assert ("target" in found[late]) == (kind == "another target")  # three tensors are named, and the others counted
        assert ("args[0]" in found[late] and "more tensors" in found[late]) == (kind != "another target")


def test_every_n_th_call_is_compared_whole() -> None:
    """A sample of two dimensions has every element of so small a batch, so a large one is changed where no sample is."""
    for found in run_ranks(one_element, 2):
        assert [each.startswith("tensor") for each in found] == [True, True, True, True, False, True]
        assert "rank 1 differs in the values of args[0] of microbatch 1" in found[4]


def one_element(rank: int) -> list[str]:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(400, 4), nn.Linear(4, 4))
    x, y = torch.ones(8, 400), torch.ones(8, 4)
    pipe = graphpp.compile(model, F.mse_loss, split=["1"], microbatches=2, parallel=graphpp.Parallel(check_data=5))
    found = []
    for at in range(6):
        given = x.clone()
        if rank == 1 and at >= 3:
            given[5, 3] = 2
        found.append(outcome(lambda given=given: pipe.step(given, target=y).loss))
    return found


def between(rank: int) -> int:
    """The steps that pass after a row on rank 1 has changed, with a clipping after each step and an evaluation before it."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(400, 4), nn.Linear(4, 4))
    x, y = torch.ones(8, 400), torch.ones(8, 4)
    pipe = graphpp.compile(model, F.mse_loss, split=["1"], microbatches=2, parallel=graphpp.Parallel(check_data=4))
    for at in range(20):
        given = x.clone()
        if rank == 1 and at >= 3:
            given[1, 3] = 2
        pipe.eval(x, target=y)
        try:
            pipe.step(given, target=y)
        except graphpp.MismatchError:
            return at
        pipe.clip_grad_norm_(1.0)
    return -1


def test_calls_of_other_kinds_do_not_move_the_checks() -> None:
    assert run_ranks(between, 2) == [3, 3]


def test_checksums_tell_small_integers_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (20_000, 4), generator=generator)
    distinct = {tuple(row) for row in labels.tolist()}
    assert len({checksum(torch.tensor(row)) for row in distinct}) == len(distinct)
    flags = [[index >> bit & 1 for bit in range(12)] for index in range(4096)]
    assert len({checksum(torch.tensor(row, dtype=torch.bool)) for row in flags}) == 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int32, torch.complex64])
def test_samples_of_equal_values_have_equal_checksums(dtype: torch.dtype) -> None:
    values = torch.arange(6 * 8 * 40).remainder(7).view(6, 8, 40).to(dtype)
    sample = checksum_of_sample(values)
    assert sample == checksum_of_sample(values.transpose(0, 2).contiguous().transpose(0, 2))
    assert checksum_of_sample(values.conj()) == checksum_of_sample(values.conj().resolve_conj())
    assert -(2**63) <= sample < 2**63
    other = values.clone()
    other[0, 0, 0] = 1  # in every sample
    assert sample != checksum_of_sample(other)
    assert checksum_of_sample(values[0, 0, 0]) != checksum_of_sample(other[0, 0, 0])


def test_nothing_is_compared_if_so_asked() -> None:
    for found in run_ranks(behind, 2, 2, 1, "another target", {"check_data": 0}):
        assert all(each.startswith("tensor") for each in found)


@pytest.mark.parametrize("every", [-1, True, 1.5, "often"])
def test_other_intervals_are_refused(every: Any) -> None:
    with pytest.raises(graphpp.GraphPPError, match=r"parallel\.check_data: take an integer from 0"):
        graphpp.Parallel(check_data=every)


def eager(steps: int) -> list[float]:
    model, losses = Masked(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(steps):
        each = []
        for x, mask, y in zip(*(part.split(ROWS // 2) for part in batch(at)), strict=True):
            loss = F.mse_loss(model(x, mask), y)
            (loss / 2).backward()
            each.append(loss.detach())
        losses.append(float(torch.stack(each).mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def loads(rank: int, ranks: int, given: dict[int, str], evaluate: bool) -> tuple[list[str], list[float]]:
    """Train with the data of a `DataLoader`; `given`: the arguments that a rank loads, "needed", or those in a list."""
    _, pipe = compiled(ranks)
    needed = pipe.inputs_needed()
    loaded = needed if given[rank] == "needed" else given[rank].split()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for x, y in DataLoader(TensorDataset(X[: 3 * ROWS], Y[: 3 * ROWS]), batch_size=ROWS):
        x_, mask, unused, target = (
            tensor if name in loaded else graphpp.absent(tensor.shape, tensor.dtype)
            for name, tensor in (("args[0]", x), ("args[1]", y > 0), ("kwargs['unused']", y), ("target", y))
        )
        losses.append(float(pipe.step(x_, mask, unused=unused, target=target).loss))
        if evaluate:
            found = pipe.eval(x_, mask, unused=unused, target=target)
            assert found.loss is not None and (found.output is None) == (rank < ranks - 1)
        optimizer.step()
        optimizer.zero_grad()
    return needed, losses


ALL = "args[0] args[1] kwargs['unused'] target"


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("given", "evaluate"),
    [
        ({0: "needed", 1: "needed", 2: "needed"}, False),
        ({0: ALL, 1: "", 2: ""}, True),
        ({0: "", 1: "", 2: ALL}, False),
        ({0: "args[0] target", 1: "args[1]", 2: "args[1]"}, False),
    ],
    ids=["each loads what it needs", "the first loads, with evaluations", "the last loads", "mixed"],
)
def test_a_rank_is_given_what_it_needs(given: dict[int, str], evaluate: bool) -> None:
    found = run_ranks(loads, 3, 3, given, evaluate)
    assert [needed for needed, _ in found] == [["args[0]", "args[1]"], ["args[1]"], ["args[1]", "target"]]
    assert [losses for _, losses in found] == [eager(3)] * 3


def lacks(rank: int, kind: str) -> str:
    """The error of a call that cannot be completed; the pipeline goes on afterwards."""
    _, pipe = compiled(2)
    x, mask, y = batch(0)
    found = refused_for_want_of_data(pipe, rank, kind)
    assert pipe.step(x, mask, unused=y, target=y).loss > 0
    return found


def refused_for_want_of_data(pipe: graphpp.Pipeline, rank: int, kind: str) -> str:
    x, mask, y = batch(0)
    nothing = graphpp.absent(mask.shape, torch.bool)
    if kind == "nobody has it":
        return outcome(lambda: pipe.step(x, nothing, unused=y, target=y))
    if kind == "another shape":
        return outcome(lambda: pipe.step(x, mask if rank else graphpp.absent((8, 9), torch.bool), unused=y, target=y))
    own = y + rank if kind == "other data" else y
    return outcome(lambda: pipe.step(x, mask if rank else nothing, unused=y, target=own))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("nobody has it", r"BatchError: no rank was given args\[1\] of microbatch 0, which rank 0 of the pipeline reads"),
        ("another shape", r"MismatchError: .*rank 1 differs in the microbatch"),
        ("other data", r"MismatchError: .*rank 1 differs in the values of target of microbatch 0"),
    ],
)
def test_data_that_cannot_be_completed_are_refused_on_all_ranks(kind: str, says: str) -> None:
    assert all(re.match(says, each, re.DOTALL) for each in run_ranks(lacks, 2, kind))


def test_one_process_needs_all_that_the_model_reads() -> None:
    _, pipe = compiled(1)
    assert pipe.inputs_needed() == ["args[0]", "args[1]", "target"]
    x, mask, y = batch(0)
    assert pipe.step(x, mask, unused=graphpp.absent((8, 8)), target=y).loss > 0
    with pytest.raises(graphpp.BatchError, match=r"no rank was given args\[0\]"):
        pipe.step(graphpp.absent((8, 8)), mask, unused=y, target=y)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("a", torch.int8), ((1, -2), torch.int8), ((2,), "float32"), (None, torch.int8), ((1.5,), torch.int8)],
)
def test_absent_tensors_of_no_shape_are_refused(shape: Any, dtype: Any) -> None:
    with pytest.raises(graphpp.BatchError, match="absent: "):
        graphpp.absent(shape, dtype)
