"""The validated step has the bits of the synchronous one: 20 steps, some with clipping, one with an inf, one with a huge norm.

Every rank trains one pipeline several times from the same start: once with `clip_grad_norm_` and `optimizer.step()`, then
through `PostValidation` with the norm late (every rank that may steps early), early (no rank does) and with its real timing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import graphpp
from graphpp.pipeline import grad_norm as norms
from tests import internals
from tests.batch.test_loss_weights import scaler_of
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.pipeline.test_optimizer_rollback import bits
from tests.pipeline.test_step import on_ranks
from tests.special_models import CUTS, SPECIAL
from tests.training import compiled, example, step

STEPS = 20
WAYS = ("late", "early", "as it comes")
HUGE, INF = 7, 15  # steps in which a gradient's norm is beyond float32, and in which a gradient is infinite

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[Optimizer]]] = {
    "SGD": lambda p: [SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)],
    "SGD loop": lambda p: [SGD(p, lr=0.05, momentum=0.9, foreach=False)],
    "Adam amsgrad": lambda p: [Adam(p, lr=0.01, amsgrad=True, foreach=True)],
    "AdamW": lambda p: [AdamW(p, lr=0.01)],
    "AdamW fused": lambda p: [AdamW(p, lr=0.01, fused=True)],
    "AdamW groups": lambda p: [AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.1}], lr=0.01)],
    "two optimizers": lambda p: [SGD(p[:1], lr=0.05, momentum=0.9), AdamW(p[1:], lr=0.01)],
    "not all parameters": lambda p: [AdamW(p[1:], lr=0.01)],
}


class Steps(NamedTuple):
    """The values after each step, as bytes, with norms, loss scales, and the counts of early steps and rollbacks."""

    seen: list[Any]
    norms: list[float]
    scales: list[float]
    taken: int = 0
    rolled_back: int = 0


class Way(NamedTuple):
    """A way of clipping and stepping."""

    name: str
    max_norm: float
    scaler: torch.amp.GradScaler | None
    norm_type: float = 2.0


# ------------------------------------------------------------------------------------------------ on a rank


@contextmanager
def timing(name: str) -> Iterator[None]:
    """A context in which the norm is never (late) or always (early) there before a rank waits, or with its real timing."""
    says = {"late": False, "early": True}
    with patch.object(norms.PendingNorms, "arrived", lambda self: says[name]) if name in says else nullcontext():
        yield


def taking(pipe: graphpp.Pipeline, optimizers: list[Optimizer], way: Way) -> tuple[Callable[[], Tensor], Any]:
    """The function that clips and steps, and the `scaler=` of `pipe.step`."""
    if way.name != "synchronous":
        validation = graphpp.PostValidation(pipe, optimizers, way.max_norm, way.norm_type, way.scaler)
        return validation.step, validation

    def clip_and_step() -> Tensor:
        for optimizer in optimizers if way.scaler else []:
            way.scaler.unscale_(optimizer)
        norm = pipe.clip_grad_norm_(way.max_norm, way.norm_type)
        for optimizer in optimizers:
            way.scaler.step(optimizer) if way.scaler else optimizer.step()
        return norm

    return clip_and_step, way.scaler


def spoil(pipe: graphpp.Pipeline, index: int) -> None:
    """In two steps the last parameter's gradient starts huge or infinite, and `pipe.step` adds to it."""
    params = [p for p in pipe.parameters() if p.requires_grad]
    for p in params:
        p.grad = None
    if index in (HUGE, INF) and holds_last(pipe):
        params[-1].grad = torch.full_like(params[-1], 1e30 if index == HUGE else math.inf)


def holds_last(pipe: graphpp.Pipeline) -> bool:
    return list(dict(pipe.named_parameters()))[-1] == internals.all_parameters(pipe)[-1]


def run(pipe: graphpp.Pipeline, name: str, make: Any, way: Way, steps: int = STEPS) -> Steps:
    """Some steps from the pipeline's present state."""
    params = list(pipe.parameters())
    optimizers = make(params)
    end, scaler = taking(pipe, optimizers, way)
    found = Steps([], [], [])
    for index in range(steps):
        spoil(pipe, index)
        batch = SPECIAL[name](index).batch
        losses = pipe.step(*batch.args, target=batch.target, scaler=scaler if way.scaler else None).losses
        norm = end()
        if way.scaler:
            way.scaler.update()
            found.scales.append(way.scaler.get_scale())
        found.norms.append(norm.item())
        state = [optimizer.state_dict() for optimizer in optimizers]
        found.seen.append(bits([losses, norm, params, [p.grad for p in params], state]))
    counts = (scaler.taken, scaler.rolled_back) if way.name != "synchronous" else (0, 0)
    return Steps(*found[:3], *counts)


def compared(rank: int, name: str, optimizers: Sequence[str], kind: str | None, norm_type: float) -> dict[str, Any]:
    """By optimizer, for each way: the steps that differ from the synchronous ones, and the way's numbers."""
    case = SPECIAL[name]()
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    start = {fqn: value.clone() for fqn, value in case.model.state_dict().items()}
    pipe = compiled(case, split=CUTS[max(ranks, 2)], schedule="1F1B", microbatches=2, example=example(case.batch, 2))

    def again(optimizer: str, way: str, max_norm: float, steps: int = STEPS) -> Steps:
        pipe.load_state_dict(start)
        scaler = scaler_of(kind) if kind else None
        with timing(way):
            return run(pipe, name, OPTIMIZERS[optimizer], Way(way, max_norm, scaler, norm_type), steps)

    found = {}
    for optimizer in optimizers:
        max_norm = sorted(again(optimizer, "synchronous", 1e3, HUGE).norms)[HUGE // 2]
        reference = again(optimizer, "synchronous", max_norm)
        ways = {way: again(optimizer, way, max_norm) for way in WAYS}
        found[optimizer] = {"max_norm": max_norm, "reference": reference._replace(seen=[])} | {
            way: ([i for i in range(STEPS) if steps.seen[i] != reference.seen[i]], steps._replace(seen=[]))
            for way, steps in ways.items()
        }
    return found


# ------------------------------------------------------------------------------------------------ tests


def check(parts: list[dict[str, Any]], kind: str | None) -> None:
    """No step differs on any rank; some steps were clipped, some not; some were taken early, and some of these rolled back."""
    for optimizer in parts[0]:
        here = [part[optimizer] for part in parts]
        for way in WAYS:
            assert [part[way][0] for part in here] == [[]] * len(parts), (optimizer, way)
        norms, max_norm = here[0]["reference"].norms, here[0]["max_norm"]
        assert 3 <= sum(norm > max_norm for norm in norms[:INF]) <= INF - 3
        assert not math.isfinite(norms[INF])
        if kind != "off" and kind:
            scales = here[0]["reference"].scales
            assert [index for index in range(1, STEPS) if scales[index] < scales[index - 1]] == [INF]
        assert sum(part["early"][1].taken for part in here) == 0
        late = [part["late"][1] for part in here]
        assert sum(steps.taken for steps in late) > sum(steps.rolled_back for steps in late)
        if len(parts) > 1:  # a single rank knows the whole norm before it steps
            assert sum(steps.rolled_back for steps in late) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_are_the_same_bits(ranks: int) -> None:
    optimizers = ["SGD", "Adam amsgrad", "AdamW groups", "not all parameters"] if ranks == 2 else list(OPTIMIZERS)
    check(on_ranks(ranks, compared, "plain", optimizers, None, 2.0), None)


@pytest.mark.parametrize("kind", ["stock", "sharded", "off"])
def test_with_a_scaler(kind: str) -> None:
    optimizers = {"stock": ["SGD", "AdamW fused", "two optimizers"], "sharded": ["AdamW"], "off": ["AdamW fused"]}
    check(run_ranks(compared, 2, "plain", optimizers[kind], kind, 2.0), kind)


@pytest.mark.parametrize(
    "ranks, name, norm_type", [(2, "norms", 1.0), (4, "partial", math.inf), *further((4, "tied", 2.0))]
)
def test_other_models_and_norms(ranks: int, name: str, norm_type: float) -> None:
    check(run_ranks(compared, ranks, name, ["AdamW"], None, norm_type), None)


# ------------------------------------------------------------------------------------------------ odd ranks and optimizers


def net() -> tuple[graphpp.Pipeline, Tensor]:
    """A pipeline of three stages, of which the second has no parameters; its input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
    x = torch.randn(6, 8)
    pipe = graphpp.compile(
        model,
        F.mse_loss,
        example=graphpp.Microbatch((x[:2],), target=torch.zeros(2, 10)),
        split=["1", "2"],
        microbatches=3,
    )
    return pipe, x


def without_parameters(rank: int, kind: str | None) -> tuple[int, list[float]]:
    """One rank has no parameters, so its optimizer and its scaler have none either."""
    pipe, x = net()
    params = list(pipe.parameters())
    scaler = scaler_of(kind) if kind else None
    validation = graphpp.PostValidation(pipe, SGD(params, lr=0.1) if params else [], 0.1, scaler=scaler)
    found = []
    for index in range(3):
        for p in params:
            p.grad = torch.full_like(p, math.inf) if index == 1 and rank == 2 else None
        pipe.step(x, target=torch.zeros(6, 10), scaler=validation if scaler else None)
        found.append(validation.step().item())
        if scaler:
            scaler.update()
            found.append(scaler.get_scale())
    return len(params), found


@pytest.mark.parametrize("kind", [None, "stock"])
def test_a_rank_without_parameters_takes_part(kind: str | None) -> None:
    parts = run_ranks(without_parameters, 3, kind)
    assert [count for count, _ in parts] == [2, 0, 2]
    assert len({repr(numbers) for _, numbers in parts}) == 1
    if kind:
        assert parts[0][1][1::2] == [1024.0, 512.0, 512.0]
        assert math.isfinite(parts[0][1][4])  # no rank took the infinite step


def plain() -> graphpp.Pipeline:
    """A pipeline after the backward of one batch."""
    case = SPECIAL["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=2)
    step(pipe, case.batch)
    return pipe


def test_a_step_that_cannot_be_checked_is_rolled_back() -> None:
    pipe = plain()
    optimizer = AdamW(pipe.parameters(), lr=0.1)
    validation = graphpp.PostValidation(pipe, optimizer, 1e3)
    before = bits(list(pipe.parameters()))
    steps: list[Any] = []

    def lost(self: norms.PendingNorms) -> Tensor:
        steps.append(bits(list(pipe.parameters())))
        raise RuntimeError("connection closed")

    with timing("late"), patch.object(norms.PendingNorms, "total", lost), pytest.raises(RuntimeError, match="closed"):
        validation.step()
    assert steps[0] != before
    assert bits(list(pipe.parameters())) == before
    assert optimizer.state_dict()["state"] == {}


def test_hooks_run_once_a_step() -> None:
    pipe = plain()
    optimizer, calls = SGD(pipe.parameters(), lr=0.1), []
    validation = graphpp.PostValidation(pipe, optimizer, 1e3)
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    with timing("late"):
        validation.step()
        assert (validation.taken, calls) == (0, ["step"])
        handle.remove()
        validation.step()
    assert validation.taken == 1


def test_a_schedule_of_learning_rates_is_followed() -> None:
    found = []
    for way in ("synchronous", "late"):
        pipe = plain()
        optimizer = SGD(pipe.parameters(), lr=0.5)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        end, _ = taking(pipe, [optimizer], Way(way, 1e3, None))
        with timing(way):
            for _ in range(3):
                end()
                rates.step()
        found.append(bits([list(pipe.parameters()), optimizer.state_dict()]))
    assert found[0] == found[1]


def test_what_cannot_be_taken_back_is_refused() -> None:
    pipe = plain()
    with pytest.raises(graphpp.GraphPPError, match="LBFGS steps with a closure"):
        graphpp.PostValidation(pipe, torch.optim.LBFGS(pipe.parameters()), 1.0)
    sharded = torch.optim.SGD(pipe.parameters(), 0.1)
    sharded.process_group = object()  # type: ignore[attr-defined]  # as torch's ZeroRedundancyOptimizer has
    with pytest.raises(graphpp.GraphPPError, match="exchanges values with other ranks"):
        graphpp.PostValidation(pipe, sharded, 1.0)
    with pytest.raises(graphpp.GraphPPError, match="needs torch optimizers, got list"):
        graphpp.PostValidation(pipe, [list(pipe.parameters())], 1.0)  # type: ignore[list-item]
    with pytest.raises(graphpp.GraphPPError, match=r"scaler must be a torch\.amp\.GradScaler, got float"):
        graphpp.PostValidation(pipe, SGD(pipe.parameters()), 1.0, scaler=2.0)  # type: ignore[arg-type]
    optimizer = SGD(pipe.parameters())
    optimizer.param_groups[0]["what"] = object()
    with pytest.raises(graphpp.GraphPPError, match=r"param_groups\['what'\] holds a object"):
        graphpp.PostValidation(pipe, optimizer, 1.0)
