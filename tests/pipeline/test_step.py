"""What a step does beyond the numbers of a plain stack: accumulation, modes, buffers, odd inputs, odd parameters.

Everything is compared with an eager loop bit for bit, in one process and on two ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.models import Batch, Case
from tests.reference import eager_steps, gradients
from tests.special_models import CUTS, SPECIAL
from tests.training import capturing, compiled, differences, eager, joined, local_grads, step, trained, unequal

pytestmark = pytest.mark.usefixtures("shared_captures")
TWO = {"split": CUTS[2], "schedule": "1F1B"}
FOUR = {"split": CUTS[4], "schedule": "Interleaved1F1B"}


def on_ranks(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(rank, *args)` on every rank, whose calls share captured graphs; one rank is this process."""
    return [fn(0, *args)] if ranks == 1 else run_ranks(with_shared_captures, ranks, fn, *args)


def with_shared_captures(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    with capturing("test_step"):
        return fn(rank, *args)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("ranks", [2, *further(1)])
@pytest.mark.parametrize("name", ["norms", "skip", "partial", "several"])
def test_odd_models_train_like_eager(name: str, ranks: int) -> None:
    assert differences(trained(ranks, name, **FOUR, microbatches=4), eager(name, 4)) == []


def test_skip_connection_over_four_ranks() -> None:
    assert differences(trained(4, "skip", split=CUTS[4], schedule="1F1B", microbatches=8), eager("skip", 8)) == []


@pytest.mark.parametrize("ranks", [2, *further(1)])
def test_sum_of_losses(ranks: int) -> None:
    options = {**TWO, "microbatches": 4, "gradients": "sum"}
    assert differences(trained(ranks, "plain", **options), eager("plain", 4, reduction="sum")) == []


def tied_run(rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    case = SPECIAL["tied"]()
    pipe = compiled(case, **TWO, microbatches=4)
    grads, norms, weights = [], [], []
    optimizer = None
    for seed in range(3):
        if optimizer:
            optimizer.zero_grad()
        step(pipe, SPECIAL["tied"](seed).batch)
        optimizer = optimizer or torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        weight = case.model.embed.weight
        grads.append(weight.grad.clone())
        norms.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
        weights.append(weight.detach().clone())
    assert case.model.head.weight is case.model.embed.weight
    return grads, norms, weights


def test_tied_parameter_across_ranks() -> None:
    (grads, norms, weights), *others = on_ranks(2, tied_run)
    for other_grads, other_norms, other_weights in others:
        assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(norms, other_norms, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
    reference = eager("tied", 4)
    theirs = reference.grads[0]["embed.weight"]
    assert theirs is not None
    assert (grads[0] - theirs).norm() <= 1e-6 * theirs.norm()
    # Counted once: counted on both ranks, the norm would be far off.
    for mine, eager_norm in zip(norms, reference.norms, strict=True):
        torch.testing.assert_close(mine, eager_norm, rtol=1e-5, atol=0)


def accumulate_twice(rank: int) -> dict[str, Tensor | None]:
    case = SPECIAL["plain"]()
    pipe = compiled(case, **FOUR, microbatches=4)
    for seed in range(2):
        step(pipe, SPECIAL["plain"](seed).batch)
    return local_grads(pipe)


@pytest.mark.parametrize("ranks", [2, *further(1)])
def test_gradients_accumulate_over_steps(ranks: int) -> None:
    case = SPECIAL["plain"]()
    for seed in range(2):
        for part in SPECIAL["plain"](seed).batch.microbatches(4):
            (F.cross_entropy(case.model(*part.args), part.target) / 4).backward()
    assert unequal(joined(on_ranks(ranks, accumulate_twice)), gradients(case.model)) == []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_step_makes_gradients_in_any_grad_mode(context: Callable[[], Any]) -> None:
    case = SPECIAL["plain"]()
    with context():
        pipe = compiled(case, **TWO, microbatches=4)
        step(pipe, case.batch)
        step(pipe, case.batch)
    assert not any(p.grad.is_inference() for p in pipe.parameters())
    eager_case = SPECIAL["plain"]()
    for part in 2 * eager_case.batch.microbatches(4):
        (F.cross_entropy(eager_case.model(*part.args), part.target) / 4).backward()
    assert unequal(gradients(case.model), gradients(eager_case.model)) == []


def test_autocast_is_that_of_the_call() -> None:
    case = SPECIAL["plain"]()
    pipe = compiled(case, **TWO, microbatches=4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = step(pipe, case.batch).losses
    outside = step(pipe, case.batch).losses
    parts = case.batch.microbatches(4)
    plain = torch.stack([F.cross_entropy(case.model(*part.args), part.target) for part in parts])
    with torch.autocast("cpu", torch.bfloat16):
        low = torch.stack([F.cross_entropy(case.model(*part.args), part.target) for part in parts])
    assert torch.equal(inside, low)
    assert torch.equal(outside, plain)
    assert not torch.equal(inside, outside)


@pytest.mark.parametrize("ranks", [2, *further(1)])
def test_model_in_eval_mode_trains_as_it_is(ranks: int) -> None:
    for found in on_ranks(ranks, half_in_eval):
        assert found == ([], [False, True])


def half_in_eval(rank: int) -> tuple[list[str], list[bool]]:
    """All but layer 0 in eval mode: their statistics stay. What differs from eager, and which flags there are then."""
    case = SPECIAL["norms"]()
    case.model.eval()
    case.model.layers[0].train()
    flags = [module.training for module in case.model.modules()]
    reference = eager_steps(case.model, case.loss, [case.batch], 4, 2)
    pipe = compiled(case, **TWO, microbatches=4)
    optimizer = None
    for _ in range(2):
        if optimizer:
            optimizer.zero_grad()
        step(pipe, case.batch)
        optimizer = optimizer or torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        optimizer.step()
    assert [module.training for module in case.model.modules()] == flags
    wrong = [fqn for fqn, p in pipe.named_parameters() if not torch.equal(p, reference.params[fqn])]
    wrong += [fqn for fqn, b in pipe.named_buffers() if not torch.equal(b, reference.buffers[fqn])]
    return wrong, sorted(set(flags))


def test_flags_are_looked_at_in_every_step() -> None:
    case = SPECIAL["norms"]()
    pipe = compiled(case, **TWO, microbatches=4)
    step(pipe, case.batch)
    case.model.eval()
    step(pipe, case.batch)
    case.model.layers[0].requires_grad_(False)
    step(pipe, case.batch)
    assert case.model.layers[0][1].num_batches_tracked == 4
    grad = case.model.layers[0][0].weight.grad.clone()
    step(pipe, case.batch)
    assert torch.equal(case.model.layers[0][0].weight.grad, grad)


def count_batches(rank: int) -> dict[str, Tensor]:
    case = SPECIAL["norms"]()
    pipe = compiled(case, **FOUR, microbatches=8)
    step(pipe, case.batch)
    return dict(pipe.named_buffers())


@pytest.mark.parametrize("ranks", [2, *further(1)])
def test_batch_norm_sees_every_microbatch_once(ranks: int) -> None:
    buffers = joined(on_ranks(ranks, count_batches))
    tracked = [value for fqn, value in buffers.items() if fqn.endswith("num_batches_tracked")]
    assert [int(value) for value in tracked] == [8] * 4
    assert unequal(buffers, eager("norms", 8, steps=1).buffers) == []


def masked_step(rank: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    case = SPECIAL["masked"]()
    pipe = compiled(case, **FOUR, microbatches=4)
    batch = case.batch
    kwargs = {**batch.kwargs, "table": graphpp.whole(batch.kwargs["table"])}
    return step(pipe, Batch(batch.args, kwargs, batch.target)).losses, local_grads(pipe)


@pytest.mark.parametrize("ranks", [2, *further(1)])
def test_arguments_of_middle_stages_and_without_batch_dimension(ranks: int) -> None:
    found = on_ranks(ranks, masked_step)
    reference = eager("masked", 4, steps=1)
    assert all(torch.equal(losses, reference.losses[0]) for losses, _ in found)
    assert unequal(joined([grads for _, grads in found]), reference.grads[0]) == []


def test_whole_microbatches_and_examples() -> None:
    case = SPECIAL["masked"]()
    (args, kwargs, target), *_ = case.batch.microbatches(4)
    part = graphpp.Microbatch(args, {**kwargs, "table": graphpp.whole(kwargs["table"])}, target)
    pipe = compiled(case, **TWO, example=part, microbatches=4)
    assert torch.equal(pipe.step_microbatches([part]).losses, eager("masked", 4, steps=1).losses[0][:1])


def test_local_parameters_are_the_models_own() -> None:
    case = SPECIAL["partial"]()
    before = dict(case.model.named_parameters())
    pipe = compiled(case, **TWO, microbatches=4)
    step(pipe, case.batch)
    assert list(pipe.named_parameters()) == list(case.model.named_parameters())
    assert all(parameter is before[fqn] for fqn, parameter in pipe.named_parameters())
    nothing = {fqn for fqn, parameter in pipe.named_parameters() if parameter.grad is None}
    assert nothing == {"spare.weight", "spare.bias", "layers.1.weight", "layers.1.bias"}


def mixed_dtypes(rank: int) -> tuple[Tensor, list[Tensor]]:
    case, twin = SPECIAL["plain"](), SPECIAL["plain"]()
    for model in (case.model, twin.model):
        model.layers[1].to(torch.bfloat16)
        model.layers[3].to(torch.bfloat16)
        for index in (1, 3):
            model.layers[index].register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
            model.layers[index].register_forward_hook(lambda _, args, out: out.float())
    pipe = compiled(case, **TWO, microbatches=4)
    step(pipe, case.batch)
    for part in twin.batch.microbatches(4):
        (F.cross_entropy(twin.model(*part.args), part.target) / 4).backward()
    total = nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01)
    expected = gradients(twin.model)
    norm = pipe.clip_grad_norm_(0.01)
    assert [fqn for fqn, p in pipe.named_parameters() if not torch.equal(p.grad, expected[fqn])] == []
    return total, [norm]


def test_norm_over_several_dtypes() -> None:
    for total, (norm,) in on_ranks(2, mixed_dtypes):
        assert torch.equal(norm, total)


@pytest.mark.parametrize("norm_type", [1.0, 3.0, float("inf")])
def test_norm_types(norm_type: float) -> None:
    case = SPECIAL["partial"]()
    pipe = compiled(case, **TWO, microbatches=4)
    step(pipe, case.batch)
    expected = nn.utils.get_total_norm([p.grad for p in case.model.parameters() if p.grad is not None], norm_type)
    assert torch.equal(pipe.clip_grad_norm_(1e9, norm_type), expected)


class Watchful(nn.Module):
    """Counts outside of itself how often it is called, and how often on real data."""

    calls: list[bool]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(type(x) is Tensor and x.device.type == "cpu")
        return self.layer(x)


CALLS: list[bool] = []


def test_the_forward_never_runs_on_data() -> None:
    CALLS.clear()
    case = Case(Watchful(), F.cross_entropy, SPECIAL["plain"]().batch)
    pipe = compiled(case, microbatches=4)
    for _ in range(2):
        step(pipe, case.batch)
        pipe.eval(*case.batch.args)
    assert CALLS
    assert not any(CALLS)
