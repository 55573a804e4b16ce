"""Numbers in attributes that a forward changes: eager's values and attributes after every step, or a refusal."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpp
from graphpp import CaptureError, GraphPPError
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.models import Batch, Case
from tests.reference import gradients, model_loss
from tests.training import same

WIDTH = 4
Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """Two linear layers, numbers in attributes, containers and the class, and a function of model and input as its forward."""

    rows = 0

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.window, self.steps, self.length, self.aux = 8, 0, 0, 0.0
        self.limits = {"window": 8, "steps": 0}
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def batch(seed: int, rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch((torch.randn(rows, WIDTH, generator=generator),), {}, torch.randn(rows, WIDTH, generator=generator))


def numbers_of(model: nn.Module) -> dict[str, Any]:
    """The plain numbers of all modules, also in dicts, by FQN."""
    found = {}
    for fqn, module in model.named_modules():
        for key, value in vars(module).items():
            found |= {f"{fqn}.{key}": value} if type(value) in (int, float, bool) else {}
            found |= {f"{fqn}.{key}.{k}": v for k, v in value.items() if type(v) is int} if type(value) is dict else {}
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    optimizer.zero_grad()
    losses = step()
    grads = gradients(model)
    optimizer.step()
    return losses, grads


def check_steps(case: Case, batches: list[Batch], ignored: tuple[str, ...] = (), captures: int = 1) -> nn.Module:
    """Losses, gradients, buffers and numbers of each step are eager's, microbatch by microbatch; returns the model."""
    eager, model = copy.deepcopy(case.model), case.model
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, eager)]
    pipe = graphpp.compile(model, case.loss, split=["second"], schedule="GPipe", microbatches=2)

    def plain(each: Batch) -> Tensor:
        losses = [model_loss(eager, case.loss, part) for part in each.microbatches(2)]
        for loss in losses:
            (loss / 2).backward()
        return torch.stack([loss.detach() for loss in losses])

    with internals.captures() as made:
        for each in batches:
            mine = train(model, optimizers[0], lambda each=each: pipe.step(*each.args, target=each.target).losses)
            theirs = train(eager, optimizers[1], lambda each=each: plain(each))
            assert torch.equal(mine[0], theirs[0])
            assert all(same(mine[1][fqn], theirs[1][fqn]) for fqn in theirs[1])
            assert all(torch.equal(value, eager.get_buffer(fqn)) for fqn, value in model.named_buffers())
            mine, theirs = numbers_of(model), numbers_of(eager)
            assert {key: value for key, value in mine.items() if key not in ignored} == theirs
    assert len(made) == captures
    return model


def clamped(m: Any, x: Tensor) -> Tensor:
    if len(x) < m.window:
        m.window = len(x)
    return m.second(m.first(x) * m.window)


def clamped_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.limits["window"] = min(m.limits["window"], len(x))
    return m.second(m.first(x) * m.limits["window"])


def overwriting(m: Any, x: Tensor) -> Tensor:
    m.length = len(x)
    return m.second(m.first(x) * m.length)


def with_auxiliary_loss(m: Any, x: Tensor) -> Tensor:
    m.aux = 0.0
    hidden = m.first(x)
    m.aux = m.aux + hidden.pow(2).mean()
    return m.second(hidden) + m.aux


def all_of_them(m: Any, x: Tensor) -> Tensor:
    m.rows = len(x)  # from now on an attribute of the instance
    m.window, m.length = min(m.window, len(x)), len(x)
    return with_auxiliary_loss(m, x * m.window * m.length)


SAME = {
    "a last value": clamped,
    "a last value in a dict": clamped_in_a_dict,
    "an overwritten number": overwriting,
    "a tensor in place of a number": with_auxiliary_loss,
    "all of them": all_of_them,
}


@pytest.mark.parametrize("name", SAME)
def test_steps_and_attributes_are_those_of_eager(name: str) -> None:
    lost = (".aux",) if SAME[name] in (with_auxiliary_loss, all_of_them) else ()
    check_steps(Case(Model(SAME[name]), square, batch(0)), [batch(seed) for seed in range(3)], lost)
    assert Model.rows == 0


def test_another_shape_is_captured_for_each_number_that_it_meets() -> None:
    batches = [batch(0), batch(1, rows=8), batch(2), batch(3, rows=8), batch(4)]
    check_steps(Case(Model(overwriting), square, batch(0)), batches, captures=5)


def test_a_last_value_counts_for_the_next_shape() -> None:
    """Eager's window stays at 2 after microbatches of 2 rows, and so it is 2 for microbatches of 4 rows.

    Three captures for one size each, and two, one per window, that find the size fixed by the model.
    """
    batches = [batch(0, rows=8), batch(1), batch(2, rows=8), batch(3)]
    model = check_steps(Case(Model(clamped), square, batch(0)), batches, captures=5)
    assert model.window == 2


def test_a_number_set_by_the_user_is_followed() -> None:
    model = Model(clamped)
    check_steps(Case(model, square, batch(0)), [batch(0)])
    model.window = 1
    check_steps(Case(model, square, batch(0)), [batch(1)])
    assert model.window == 1


def test_microbatches_of_two_shapes_in_one_call_are_refused() -> None:
    parts = [graphpp.Microbatch((part.args[0],), {}, part.target) for part in (batch(0), batch(1, rows=6), batch(2))]
    with pytest.raises(CaptureError, match="the number length, and differently for microbatches of different shapes"):
        graphpp.compile(Model(overwriting), square, split=["second"], schedule="GPipe").step_microbatches(parts)


def test_a_tensor_that_no_rank_keeps_cannot_be_read() -> None:
    model = Model(with_auxiliary_loss)
    graphpp.compile(model, square, split=["second"], microbatches=2).step(*batch(0).args, target=batch(0).target)
    for use in (float, bool, lambda value: value + 1, lambda value: torch.ones(1) * value, lambda value: value.item()):
        with pytest.raises(GraphPPError, match=r"assigns a tensor to aux.*Let the loss function return"):
            use(model.aux)
    assert "aux" in repr(model.aux)
    assert "aux" in repr(pickle.loads(pickle.dumps(copy.deepcopy(model.aux))))
    model.function = lambda m, x: m.second(m.first(x)) + (m.aux if isinstance(m.aux, Tensor) else 0)
    with pytest.raises(GraphPPError, match=rf"assigns a tensor to aux.*read at {__file__}:\d+"):
        graphpp.compile(model, square, split=["second"], microbatches=2).step(*batch(0).args, target=batch(0).target)


def counting(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.second(m.first(x)) * (1 if m.steps > 100 else 0.5)


def counting_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.limits["steps"] += 1
    return m.second(m.first(x))


def other_in_the_first_call(m: Any, x: Tensor) -> Tensor:
    scale = 2 if m.length == 0 else 1
    m.length = 5
    return m.second(m.first(x)) * scale


def carrying(m: Any, x: Tensor) -> Tensor:
    before, m.aux = m.aux, m.first(x).mean()
    return m.second(m.first(x)) + (before if isinstance(before, Tensor) else 0.0)


REFUSED = {
    counting: rf"changes steps \(at {__file__}:\d+ .*leaves another value than the first",
    counting_in_a_dict: r"changes limits\.steps, .*leaves another value than the first",
    other_in_the_first_call: rf"changes length \(at {__file__}:\d+ .*computes other values than the first",
    carrying: rf"changes aux \(at {__file__}:\d+ .*the second call cannot be traced \(the forward assigns a tensor to aux",
}


@pytest.mark.parametrize("function", REFUSED)
def test_numbers_on_which_a_value_may_depend_are_refused(function: Forward) -> None:
    model = Model(function)
    before = numbers_of(model)
    with pytest.raises(CaptureError, match=rf"(?s){REFUSED[function]}.*register it as a buffer"):
        graphpp.compile(model, square, split=["second"], microbatches=2).step(*batch(0).args, target=batch(0).target)
    assert numbers_of(model) == before


def steps_of_swin(rank: int, ranks: int) -> list[Any]:
    """Losses of two steps, gradients and window sizes of a Swin whose windows are larger than its last feature maps."""
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(0)
    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5,
        drop_path_rate=0.0,
    )  # fmt: skip
    model = SwinForImageClassification(config)
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 5, (4,), generator=generator)
    losses = []
    if ranks:
        pipe = graphpp.compile(model, None, split=2, schedule="1F1B", microbatches=2)
        losses = [pipe.step(pixel_values=images, labels=labels).losses for _ in range(2)]
    else:
        for _ in range(2):
            parts = [model(pixel_values=x, labels=y).loss for x, y in zip(images.chunk(2), labels.chunk(2), strict=True)]
            (parts[0] / 2).backward()
            (parts[1] / 2).backward()
            losses.append(torch.stack(parts).detach())
    sizes = {name: (each.window_size, each.shift_size) for name, each in model.named_modules() if hasattr(each, "shift_size")}
    own = dict(pipe.named_parameters()) if ranks else dict(model.named_parameters())
    return [losses, {fqn: parameter.grad for fqn, parameter in own.items()}, sizes]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, *further(2)])
def test_swin_clamps_its_windows(ranks: int) -> None:
    losses, grads, sizes = steps_of_swin(0, 0)
    assert len(set(sizes.values())) > 1
    found = [steps_of_swin(0, 1)] if ranks == 1 else run_ranks(steps_of_swin, ranks, ranks)
    mine: dict[str, Any] = {}
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each[0], losses, strict=True))
        assert each[2] == sizes
        mine |= {fqn: grad for fqn, grad in each[1].items() if grad is not None}
    assert all(torch.equal(mine[fqn], grad) for fqn, grad in grads.items() if grad is not None)
