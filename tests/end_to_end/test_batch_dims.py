"""`microbatches=graphpp.Microbatches(batch_dims=...)`: rows in any dimension of a tensor, or in none, against a plain loop."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further

ROWS, LENGTH, WORDS = 8, 5, 20


class Packed(NamedTuple):
    tokens: Tensor
    starts: Tensor  # of the sequences, [ROWS + 1] or any number
    ends: Tensor


class Net(nn.Module):
    """Reads tokens [batch, length], or [length, batch] under `sequence_first`."""

    def __init__(self, sequence_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.middle, self.length = nn.Linear(8, 8), 0 if sequence_first else 1

    def forward(self, packed: Packed | Tensor, positions: Tensor | None = None) -> dict[str, Any]:
        tokens = packed if isinstance(packed, Tensor) else packed.tokens
        x = self.embedding(tokens)
        if isinstance(packed, Packed):
            x = x + packed.starts.float().mean() + packed.ends.float().square().sum() / 1000
        if positions is not None:  # [3, batch, length], as of multimodal rotary embeddings
            x = x + (positions.float() * torch.tensor([1.0, 0.5, 0.25])[:, None, None]).sum(0)[..., None].cos()
        x = self.middle(x).tanh().cumsum(self.length)
        return {"logits": self.head(x), "mean": x.mean()}


def loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed))


class Kind(NamedTuple):
    """A batch, its dimensions, and the arguments of the microbatch with the rows of a slice."""

    dims: dict[str, int | None]
    batch: graphpp.Microbatch
    part: Callable[[slice], tuple[tuple[Any, ...], dict[str, Any], Tensor]]
    sequence_first: bool = False


def packed(entries: int) -> Kind:
    """`entries` starts and ends, in both of which the first dimension is no batch, but more frequent than the rows."""
    tokens, target, starts = words(ROWS, LENGTH), words(ROWS, LENGTH, seed=1), torch.arange(entries)
    batch = graphpp.Microbatch((Packed(tokens, starts, starts + 1),), {}, target)
    dims: dict[str, int | None] = {"packed.starts": None, "args[0].ends": None}
    return Kind(dims, batch, lambda rows: ((Packed(tokens[rows], starts, starts + 1),), {}, target[rows]))


def sequence_first(length: int) -> Kind:
    tokens, target = words(length, ROWS), words(length, ROWS, seed=1)
    dims: dict[str, int | None] = {"packed": 1, "target": -1}
    return Kind(dims, graphpp.Microbatch((tokens,), {}, target), lambda rows: ((tokens[:, rows],), {}, target[:, rows]), True)


def positions(rows: int) -> Kind:
    tokens, target, places = words(rows, LENGTH), words(rows, LENGTH, seed=1), words(3, rows, LENGTH, seed=2)
    batch = graphpp.Microbatch((tokens,), {"positions": places}, target)
    return Kind({"positions": 1}, batch, lambda rows: ((tokens[rows],), {"positions": places[:, rows]}, target[rows]))


KINDS: dict[str, Callable[[], Kind]] = {
    "a tensor that is no batch": lambda: packed(9),
    "a tensor that is as long as the batch": lambda: packed(ROWS),
    "length before batch": lambda: sequence_first(LENGTH),
    "as long as the batch": lambda: sequence_first(ROWS),
    "batch within": lambda: positions(ROWS),
    "rows that do not divide": lambda: positions(7),
}


def compiled(kind: Kind, **options: Any) -> tuple[nn.Module, graphpp.Pipeline]:
    model = Net(kind.sequence_first)
    cut = graphpp.Microbatches(4, batch_dims=kind.dims)
    return model, graphpp.compile(copy.deepcopy(model), loss, split=["head"], microbatches=cut, **options)


def step(pipe: graphpp.Pipeline, batch: graphpp.Microbatch) -> graphpp.StepResult:
    return pipe.step(*batch.args, target=batch.target, **batch.kwargs)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_and_an_evaluation_are_those_of_a_plain_loop(name: str) -> None:
    kind = KINDS[name]()
    model, pipe = compiled(kind)
    dim = 1 if kind.sequence_first else 0
    size = -(-kind.batch.target.shape[dim] // 4)
    parts = [kind.part(slice(at, at + size)) for at in range(0, 4 * size, size)]
    outputs = [model(*args, **kwargs) for args, kwargs, _ in parts]
    losses = [loss(output, target) for output, (_, _, target) in zip(outputs, parts, strict=True)]
    for each in losses:
        (each / 4).backward()
    assert torch.equal(step(pipe, kind.batch).losses, torch.stack(losses).detach())
    for (fqn, mine), theirs in zip(pipe.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), fqn
    pipe.zero_grad()
    assert torch.equal(pipe.step_microbatches([graphpp.Microbatch(*part) for part in parts]).losses, torch.stack(losses))
    found = pipe.eval(*kind.batch.args, target=kind.batch.target, **kind.batch.kwargs)
    assert torch.equal(found.output["logits"], torch.cat([output["logits"] for output in outputs], dim))
    assert torch.equal(found.output["mean"], torch.stack([output["mean"] for output in outputs]).mean())


def test_outputs_are_joined_along_the_dimension_that_is_said() -> None:
    kind = sequence_first(ROWS)
    for said, shape in (({"output": 0}, [4 * ROWS, 2]), ({"output.logits": None}, [4, ROWS, 2])):
        _, pipe = compiled(kind._replace(dims={**kind.dims, **said}))  # type: ignore[dict-item]
        if said.get("output", 1) == 0:
            with pytest.raises(graphpp.BatchError, match=r"output\['logits'\] has the shape \[8, 2, 20\] for .* of 2 rows"):
                pipe.eval(*kind.batch.args)
        else:
            assert list(pipe.eval(*kind.batch.args).output["logits"].shape[:3]) == shape
    tokens = words(ROWS, 2)  # the rows of a microbatch are as many as words in a row
    model = nn.Embedding(WORDS, 3)
    joined = graphpp.compile(model, microbatches=graphpp.Microbatches(4, {"output": 1, "input": 0})).eval(tokens)
    assert torch.equal(joined.output, torch.cat([model(part) for part in tokens.chunk(4)], 1))


@pytest.mark.parametrize("reduction", ["rows", *further("mean")])
def test_rows_weigh_a_microbatch_and_verify_cuts_alike(reduction: str) -> None:
    kind = positions(7)
    model, pipe = compiled(kind, gradients=reduction)
    result, cut = step(pipe, kind.batch), graphpp.Microbatches(4, batch_dims=kind.dims)
    if reduction == "rows":
        whole = loss(model(*kind.batch.args, **kind.batch.kwargs), kind.batch.target)
        torch.testing.assert_close(result.loss, whole.detach())
    of_batch = graphpp.verify(
        model, loss, kind.batch, split=["head"], microbatches=cut, gradients=reduction, against="whole batch"
    )
    assert of_batch.cut.ok and of_batch.whole_batch is not None and of_batch.whole_batch.ok == (reduction == "rows")
    assert graphpp.verify(model, loss, kind.batch, split=["head"], microbatches=cut).ok  # rows are rolled along dimension 1


REFUSED: dict[str, tuple[dict[str, int | None], str]] = {
    "an unknown part": ({"packed.cu_seqlen": None}, r"batch_dims: 'packed.cu_seqlen' is no part of the call, which has packed"),
    "an unknown name": ({"position": 1}, r"batch_dims: 'position' is no argument of Net\.forward\. Take packed, positions, ta"),
    "no such dimension": ({"positions": 3}, r"batch_dims: kwargs\['positions'\] has the shape \[3, 8, 5\], and no dimension 3"),
    "other rows": ({"positions": 2, "packed": 0}, r"kwargs\['positions'\] has 5 rows in dimension 2, and args\[0\] has 8 in"),
    "a dimension that is none": ({"positions": "1"}, "microbatches.batch_dims: take a dict"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", REFUSED)
def test_dimensions_that_do_not_fit_are_refused(name: str) -> None:
    dims, text = REFUSED[name]
    with pytest.raises(graphpp.BatchError, match=text):
        step(compiled(positions(ROWS)._replace(dims=dims))[1], positions(ROWS).batch)


def test_one_line_says_what_was_cut_and_what_went_whole(caplog: pytest.LogCaptureFixture) -> None:
    kind = packed(9)
    with caplog.at_level(logging.INFO, logger="graphpp"):
        for _ in range(2):
            step(compiled(kind)[1], kind.batch)
        whole = "args[0].ends, args[0].starts"
        said = f"a batch is cut along dimension 0: args[0].tokens, target; whole: {whole}"
        assert [each.levelname for each in caplog.records if each.getMessage() == said] == ["INFO"] * 2
        caplog.clear()
        _, pipe = compiled(kind._replace(dims={}))
        args = Packed(*kind.batch.args[0][:2], torch.arange(3))
        for _ in range(2):  # the majority of first dimensions decides, and nobody has said so
            pipe.step(args, target=kind.batch.target)
        (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert line.startswith(f"a batch is cut along dimension 0: args[0].tokens, target; whole: {whole}, as their first")
        assert "microbatches=graphpp.Microbatches(batch_dims={...})" in line


def on_a_rank(rank: int) -> tuple[Tensor, Any]:
    """A step with data on the first rank alone, and an evaluation."""
    torch.set_num_threads(1)
    kind = positions(ROWS)
    _, pipe = compiled(kind, schedule="1F1B")
    tokens, places, target = kind.batch.args[0], kind.batch.kwargs["positions"], kind.batch.target
    if rank:
        tokens, places, target = (graphpp.absent(tuple(each.shape), torch.int64) for each in (tokens, places, target))
    losses = [pipe.step(tokens, positions=places, target=target).losses for _ in range(2)][-1]
    output = pipe.eval(tokens, positions=places).output
    return losses, None if output is None else output["logits"]


def test_ranks_without_data_get_pieces_of_any_dimension() -> None:
    kind = positions(ROWS)
    model = Net()
    (losses, none), (others, logits) = run_ranks(on_a_rank, 2)
    assert torch.equal(losses, others) and none is None
    parts = [kind.part(slice(at, at + 2)) for at in range(0, ROWS, 2)]
    assert torch.equal(losses, torch.stack([loss(model(*args, **kwargs), target) for args, kwargs, target in parts]))
    assert torch.equal(logits, torch.cat([model(*args, **kwargs)["logits"] for args, kwargs, _ in parts]))
