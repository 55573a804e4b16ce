"""Gradients are summed in microbatch order, in whatever order they come, and never in another tensor's memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import graphpp
from graphpp.runtime.gradients.accumulate import Accumulator
from graphpp.runtime.gradients.tied import TiedReduction
from tests.distributed import run_ranks

D = 5


def gradients(count: int) -> list[Tensor]:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(D, generator=generator) * 10.0 ** (index % 4) for index in range(count)]


def accumulated(
    order: list[int], values: list[Tensor], *, shared: bool = False, initial: Tensor | None = None
) -> Tensor:
    total = Accumulator(["w"], ["w"] if shared else [])
    total.start({} if initial is None else {"w": initial})
    for microbatch in order:
        total.add(microbatch, "w", values[microbatch])
    return total.sums["w"]


def in_order(values: list[Tensor], initial: Tensor | None = None) -> Tensor:
    total = values[0].clone() if initial is None else initial + values[0]
    for value in values[1:]:
        total = total + value
    return total


@given(st.permutations(range(6)), st.booleans())
def test_any_order_gives_the_sum_in_order(order: list[int], begun: bool) -> None:
    initial = torch.linspace(-1e3, 1e3, D) if begun else None
    expected = in_order(gradients(6), initial)
    found = accumulated(order, gradients(6), initial=None if initial is None else initial.clone())
    assert torch.equal(found, expected)


def test_the_order_matters_for_these_numbers() -> None:
    assert not torch.equal(in_order(gradients(6)), in_order(gradients(6)[::-1]))


def test_what_was_there_is_added_to_in_place() -> None:
    initial = torch.ones(D)
    assert accumulated([0, 1], gradients(2), initial=initial) is initial


whole = torch.arange(2.0 * D)
NOT_ITS_OWN = {
    "shared": (torch.ones(D), True),
    "a part": (whole[:D], False),
    "a part with gaps": (whole[::2], False),
    "repeated": (torch.ones(1).expand(D), False),
}


@pytest.mark.parametrize("name", NOT_ITS_OWN)
def test_memory_of_others_is_copied(name: str) -> None:
    value, shared = NOT_ITS_OWN[name]
    before = value.clone()
    total = accumulated([0, 1], [value, torch.full((D,), 3.0)], shared=shared)
    assert torch.equal(value, before)
    assert torch.equal(total, before + 3)
    assert total.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def test_sums_are_not_conjugated_or_negated_when_they_are_read() -> None:
    value = torch.complex(torch.ones(D), torch.ones(D)).conj()
    for gradient in (value, value.imag):
        total = accumulated([0], [gradient])
        assert torch.equal(total, gradient) and not total.is_conj() and not total.is_neg()


def test_a_step_starts_anew() -> None:
    total = Accumulator(["v", "w"])
    total.add(1, "v", torch.ones(D))  # comes before its turn, and the step ends without its turn
    total.start({"w": torch.zeros(D)})
    assert set(total.sums) == {"w"}
    total.add(0, "v", torch.full((D,), 2.0))
    assert torch.equal(total.sums["v"], torch.full((D,), 2.0))


class OneGradient(nn.Module):
    """`a` and `b` have equal gradients; the gradient of `c`, if there is a `c`, is a view of them."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(D, D)) for _ in range(2))
        self.c = nn.Parameter(torch.randn(D, D)) if turned else None

    def forward(self, x: Tensor) -> Tensor:
        added = self.a + self.b if self.c is None else self.a + self.b + self.c.t()
        return (added * x).square().sum()


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_that_are_one_value_become_several_tensors(turned: bool) -> None:
    net, eager = OneGradient(turned), OneGradient(turned)
    pipe = graphpp.compile(net, lambda output, target: output, microbatches=2, gradients="sum")
    x = torch.randn(4, D, D)
    for _ in range(2):
        pipe.step(x, target=torch.zeros(4))
        for part in x.split(2):
            eager(part).backward()
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        assert mine.grad.stride() == theirs.grad.stride()
    assert len({parameter.grad.data_ptr() for parameter in net.parameters()}) == 2 + turned


def reduced(rank: int) -> dict[str, list[float]]:
    """Stages 0, 1, 2 on ranks 0, 1, 0 use `w`; stages 0 and 2, both on rank 0, use `v`."""
    tied = TiedReduction({"w": [0, 1, 2], "v": [0, 2]}, {"w": [0, 1], "v": [0]}, {0: 0, 1: 1, 2: 0}, dist.group.WORLD)
    parts = {(stage, fqn): gradients(6)[stage + 3 * (fqn == "v")] for stage in range(3) for fqn in "vw"}
    totals = tied.reduce(lambda stage, fqn: parts[stage, fqn], lambda _: torch.empty(D))
    return {fqn: total.tolist() for fqn, total in totals.items()}


def test_parts_are_added_in_stage_order_to_the_same_bits() -> None:
    first, second = run_ranks(reduced, 2)
    assert first["w"] == second["w"] == in_order(gradients(3)).tolist()
    assert first["v"] == in_order([gradients(6)[3], gradients(6)[5]]).tolist()
    assert set(second) == {"w"}


class Turned(nn.Module):
    """One weight, used as it is and transposed: its partial gradients have different strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x @ self.first.weight).tanh()


def trained(rank: int) -> Tensor:
    net = Turned()
    pipe = graphpp.compile(net, lambda output, target: output.square().sum(), split=["second"], microbatches=2)
    pipe.step(torch.arange(4.0 * D).view(4, D), target=torch.zeros(4))
    return net.first.weight.grad


def test_parts_that_lie_differently_in_memory_are_added_rightly() -> None:
    net = Turned()
    for part in torch.arange(4.0 * D).view(4, D).split(2):
        (net(part).square().sum() / 2).backward()
    for found in run_ranks(trained, 2):
        torch.testing.assert_close(found, net.first.weight.grad, rtol=1e-6, atol=1e-6)


class Siamese(nn.Module):
    """The second stage runs the encoder too, without a gradient: its rank's copy must be trained like the first's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.predictor = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        predicted = self.predictor(self.encoder(x).tanh())
        with torch.no_grad():
            aim = self.encoder(2 * x)
        return predicted, aim


def distance(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return (output[0] - output[1]).square().mean() + target.mean() * 0


def siamese(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    net = Siamese()
    pipe = graphpp.compile(net, distance, split=["predictor"], schedule="1F1B", microbatches=2)
    losses, x = [], torch.arange(4.0 * D).view(4, D) / 10
    for _ in range(3):
        losses.append(pipe.step(x, target=torch.zeros(4)).loss)
        for _, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return losses, [net.encoder.weight.detach()]


def test_a_copy_that_is_read_without_a_gradient_is_trained_like_the_others() -> None:
    net, losses, x = Siamese(), [], torch.arange(4.0 * D).view(4, D) / 10
    for _ in range(3):
        parts = [distance(net(part), torch.zeros(2)) for part in x.split(2)]
        sum(part / 2 for part in parts).backward()
        losses.append(torch.stack([part.detach() for part in parts]).mean())
        for parameter in net.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    for found, (weight,) in run_ranks(siamese, 2):
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(weight, net.encoder.weight.detach(), rtol=1e-6, atol=1e-7)
