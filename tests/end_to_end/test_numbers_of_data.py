"""Models whose sizes or numbers only the data decides: eager's numbers, bit for bit, and refusals that say why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import CaptureError, Memory, Microbatch
from graphpp.capture.trace import capture
from graphpp.passes.lower import LoweringOptions, lower
from graphpp.planner.layers import module_calls
from tests.capture.transfer.test_graph_data import read_again
from tests.distributed import run_ranks
from tests.exhaustive import cases, further

WIDTH = 8
CPU = torch.device("cpu")


class Experts(nn.Module):
    """Each row goes through the expert that the router chooses, as a loop over the experts' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            (own,) = torch.where(chosen == index)
            out.index_add_(0, own, expert(rows[own]) * weights[own, None])
        return x + out.view_as(x)


class Function(nn.Module):
    """A function between two layers, `self.first` and `self.last`."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def chosen(x: Tensor) -> Tensor:
    return x[..., 0] > 0


def added_rows(m: Function, x: Tensor) -> Tensor:
    rows = torch.nonzero(chosen(x).flatten()).squeeze(1)
    flat = x.flatten(0, 1)
    return flat.index_add(0, rows, flat[rows].tanh()).view_as(x)


def assigned(m: Function, x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = x[x > 0] * 2
    return x


def ragged(m: Function, x: Tensor) -> Tensor:
    lengths = (chosen(x).sum(1) + 1).clamp(max=x.shape[1]).tolist()
    return x + torch.stack([x[at, :length].sum(0) for at, length in enumerate(lengths)])[:, None]


def sliced(m: Function, x: Tensor) -> Tensor:
    return x + x.flatten(0, 1)[: chosen(x).sum().item()].tanh().sum(0)


def bounded(m: Function, x: Tensor) -> Tensor:
    count = chosen(x).sum().item()
    torch._check(count <= 100)
    return x + torch.ones(count, WIDTH).sum() * x


def padded_rows(m: Function, x: Tensor) -> Tensor:
    pad = torch.zeros_like(x)
    for at, part in enumerate(x[chosen(x)].split(chosen(x).sum(1).tolist())):
        pad[at, : part.shape[0]] = part
    return x + pad


def written_column(m: Function, x: Tensor) -> Tensor:
    rows = x[chosen(x)]
    rows[:, 0] = 0.0
    rows.view(-1, 2, 4)[:, 1] *= 2.0
    return x + rows.sum(0)


def written_buffer(m: Function, x: Tensor) -> Tensor:
    m.state[: torch.sym_min(chosen(x).sum().item(), 4)] += 1.0
    return x + m.state


def checked(m: Function, x: Tensor) -> Tensor:
    count = torch.ones_like(x[:, :, 0]).bool().sum().item()
    torch._check(count == 10)
    return x * count


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mask": lambda m, x: x + m.inner(x[chosen(x)]).tanh().sum(0),
    "mean of some rows": lambda m, x: x + x[chosen(x)].sum(0) / x[chosen(x)].shape[0],
    "rows that are added": added_rows,
    "assignment to a mask": assigned,
    "number": lambda m, x: x * x.detach().abs().sum().item(),
    "concatenation": lambda m, x: x + torch.cat([x[chosen(x)], x[~chosen(x)]]).tanh().sum(0),
    "normalised rows": lambda m, x: x + F.layer_norm(x[chosen(x)], (WIDTH,)).sum(0),
    "products of rows": lambda m, x: x + (x[chosen(x)] @ x[chosen(x)].T).softmax(-1).sum(),
    "grouped rows": lambda m, x: x + x[chosen(x)].view(-1, 2, 4).tanh().sum((0, 1)).repeat(2),
    "lengths": ragged,
    "slice": sliced,
    "bound": bounded,
    "padding of each row": padded_rows,
    "written column": written_column,
    "written buffer": written_buffer,
    "number that is checked": checked,
    "variance": lambda m, x: x + x[chosen(x)].var(0).nan_to_num(1.0),
    "numbers": lambda m, x: x * (2 * chosen(x).sum().item() - 1) + chosen(x).sum().item() / 3,
    "truth value": lambda m, x: x + chosen(x).any().item(),
}


def batch(seed: int) -> Tensor:
    """Rows of which the mask takes some; of the batches 2 and 3 the mask takes no row of one, and all rows of the other."""
    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x + {2: -10.0, 3: 10.0}.get(seed, 0.0)


def check(model: nn.Module, *, exact: bool = True, **options: Any) -> None:
    """Losses and gradients of five steps are eager's, microbatch by microbatch."""
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, F.mse_loss, **{"split": ["last"], "microbatches": 2, **options})
    same = torch.equal if exact else partial(torch.allclose, rtol=1e-3, atol=1e-5)
    for seed in range(5):
        x = batch(seed)
        torch.manual_seed(seed)
        found = pipe.step(x, target=x)
        losses = []
        for part in x.chunk(2):
            losses.append(F.mse_loss(twin(part), part))
            (losses[-1] / 2).backward()
        assert same(found.losses.nan_to_num(7.0), torch.stack(losses).detach().nan_to_num(7.0)), seed
        for (fqn, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), fqn
            if mine.grad is not None and theirs.grad is not None:
                assert same(mine.grad.nan_to_num(7.0), theirs.grad.nan_to_num(7.0)), (seed, fqn)
        for (fqn, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert same(mine, theirs), (seed, fqn)
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad = None


RECOMPUTED = ["mask", "lengths", "padding of each row", "written column", "written buffer", "number that is checked"]


@pytest.mark.first_cases(9)
@pytest.mark.filterwarnings("ignore:var")  # of one row, or of none
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_eagers(name: str) -> None:
    check(Function(FUNCTIONS[name]), schedule="ZB1P")


@pytest.mark.first_cases(3)
@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("name", [*RECOMPUTED, *further(*(name for name in FUNCTIONS if name not in RECOMPUTED))])
def test_recomputed_numbers_are_eagers(name: str) -> None:
    check(Function(FUNCTIONS[name]), schedule="ZB1P", memory="full")


@pytest.mark.parametrize("memory", [None, *further("full", "selective", 0.5, Memory(offload=True))], ids=str)
def test_routed_experts(memory: Any) -> None:
    check(Routed(), split=["layers.1", "last"], schedule="1F1B", memory=memory)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [lambda: Function(FUNCTIONS["mask"]), *further(Routed)])
def test_regions_of_known_sizes_are_compiled(make: Callable[[], nn.Module]) -> None:
    check(make(), exact=False, backend="inductor")


def of_rank(rank: int, schedule: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Routed()
    split = ["layers.0", "layers.1", "last"] if schedule == "ZBVZeroBubble" else ["layers.1"]
    pipe = graphpp.compile(model, F.mse_loss, split=split, microbatches=4, schedule=schedule)
    pipe.step(batch(0), target=batch(0))
    return {fqn: parameter.grad for fqn, parameter in pipe.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", *further("1F1B")])
def test_two_ranks(schedule: str) -> None:
    torch.manual_seed(0)
    model = Routed()
    for part in batch(0).chunk(4):
        (F.mse_loss(model(part), part) / 4).backward()
    found: dict[str, Tensor] = {}
    for each in run_ranks(of_rank, 2, schedule):
        found |= each
    assert found.keys() == {fqn for fqn, parameter in model.named_parameters() if parameter.grad is not None}
    for fqn, gradient in found.items():
        assert torch.equal(gradient, model.get_parameter(fqn).grad), fqn  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*further("experts"), *cases(FUNCTIONS, *RECOMPUTED[:2], *RECOMPUTED[4:])])
def test_a_written_graph_is_read_again(name: str) -> None:
    model = Routed() if name == "experts" else Function(FUNCTIONS[name])
    graph = capture(model, F.mse_loss, Microbatch((batch(0)[:2],), target=batch(0)[:2]), CPU)
    again = read_again(graph, model, F.mse_loss)
    assert [str(node.format_node()) for node in again.joint.graph.nodes] == [
        str(node.format_node()) for node in graph.joint.graph.nodes
    ]
    start = next(call.position for call in module_calls(graph.joint) if call.fqn == "last")
    programs = [lower(each.joint, (0, start), options=LoweringOptions(split_backward=True)).stages for each in (graph, again)]
    texts = [[item.source for stage in stages for item in stage.programs.values()] for stages in programs]
    assert texts[0] == texts[1]


def test_sizes_that_do_not_fit_each_other_raise() -> None:
    model = Function(lambda m, x: x + (x[chosen(x)] * x[x[..., 1] > 0]).sum())
    pipe = graphpp.compile(model, F.mse_loss, split=["last"], microbatches=1)
    with pytest.raises(RuntimeError, match=rf"the data of this microbatch.*{Path(__file__).name}:\d+"):
        pipe.step(batch(0), target=batch(0))


def expected(m: Any, x: Tensor) -> Tensor:
    count = chosen(x).sum().item()
    torch._check(count == 3)
    return x * count


def expected_truth(m: Any, x: Tensor) -> Tensor:
    torch._check((chosen(x).sum() == 3).item())
    return x * 2


@pytest.mark.parametrize("function", [expected, expected_truth])
def test_a_number_that_the_code_takes_for_a_constant_is_checked(function: Callable[[Any, Tensor], Tensor]) -> None:
    model = Function(function)
    pipe = graphpp.compile(model, F.mse_loss, split=["last"], microbatches=1)
    outcomes = []
    for seed in range(40):
        x = batch(seed)[:1]
        fits = int(chosen(model.first(x)).sum()) == 3
        try:
            found: Any = pipe.step(x, target=x).loss
        except RuntimeError as error:
            assert "the model needs" in str(error)
            found = None
        assert (found is not None) == fits
        outcomes.append(fits)
        if found is not None:
            assert torch.equal(found, F.mse_loss(model(x), x))
    assert {True, False} == set(outcomes)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "no bound": (lambda m, x: x + torch.ones(chosen(x).sum().item(), WIDTH).sum(), r"nothing bounds the size.*torch\._check"),
    "squeeze": (lambda m, x: x + x[chosen(x)].squeeze().tanh().sum(), r"squeeze at .*one number of dimensions"),
    "branch": (lambda m, x: x * 2 if x.sum() > 0 else x, "Values of tensors must not steer Python"),
    "branch on a size": (lambda m, x: x * 2 if x[chosen(x)].shape[0] > 3 else x, "Values of tensors must not steer Python"),
    "rounding": (lambda m, x: x * ((x.mean().item() + 1e16) - 1e16), r"as in algebra.*leave \.item\(\) out"),
    "product": (lambda m, x: x * (x.mean().item() * 0.5), "as in algebra"),
    "output": (lambda m, x: x[chosen(x)], "only the data decides the size of the output"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_cannot_be_right_for_all_data_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    pipe = graphpp.compile(Function(function), lambda y, t: y.sum(), split=["last"], microbatches=1)
    with pytest.raises(CaptureError, match=message):
        pipe.eval(batch(0), target=batch(0))


def test_a_cut_between_a_size_and_its_reader_is_refused() -> None:
    model = Function(lambda m, x: x + m.inner(x[chosen(x)]).sum(0))
    pipe = graphpp.compile(model, F.mse_loss, split=["inner"], microbatches=1)
    with pytest.raises(CaptureError, match=r"in stage 0, and inner .* reads the value in stage 1: a message has one size"):
        pipe.step(batch(0), target=batch(0))


@pytest.mark.exhaustive
def test_each_size_of_the_inputs_has_a_graph_of_its_own() -> None:
    model = Routed()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, F.mse_loss, split=["last"], microbatches=1)
    for length in (3, 5, 4, 3):
        x = batch(length)[:, :length]
        assert torch.equal(pipe.step(x, target=x).loss, F.mse_loss(twin(x), x))
