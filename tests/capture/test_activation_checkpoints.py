"""`torch.utils.checkpoint` in the model: its operations are recomputed and their values not saved; gradients are eager's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, set_checkpoint_debug_enabled
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

import graphpp
from graphpp.schedules.generate.read import make_table
from tests import training
from tests.models import hf_llama_labels

WIDTH, BLOCKS, MICROBATCHES = 8, 2, 4
kept_graph = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
convolution = torch.ops.aten.convolution.default

Call = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """One convolution, whose result the backward reads, and one dropout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.up, self.down = nn.Conv1d(WIDTH, 32, 1), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
        inner = F.silu(self.up(self.norm(x).unsqueeze(-1)).squeeze(-1))
        x = x + scale * self.drop(self.down(inner))
        return x if shift is None else x + shift


class Net(nn.Module):
    """Blocks between two linears; `call` runs a block."""

    def __init__(self, call: Call, p: float = 0.0, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(p) for _ in range(blocks))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def with_keywords(block: nn.Module, x: Tensor) -> Tensor:
    return kept_graph(block, x, scale=0.5, shift=x.detach().mean(0))


def tuples(function: Any, block: nn.Module, x: Tensor) -> Tensor:
    def both(pair: tuple[Tensor, int], other: Tensor) -> tuple[Tensor, Tensor, str]:
        y = block(other) * pair[1]
        return y, y.tanh().detach(), "text"

    y, weight, _ = function(both, (x.detach(), 2), x)
    return y + weight


def nested(outer: Any, inner: Any, block: nn.Module, x: Tensor) -> Tensor:
    return outer(lambda v: inner(block, v).sin(), x)


def selected(policy: Any, block: nn.Module, x: Tensor) -> Tensor:
    return kept_graph(block, x, context_fn=partial(selective_contexts, policy))


def in_debug_mode(block: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_debug_enabled(True):
        return kept_graph(block, x, determinism_check="none", preserve_rng_state=False)


class Watched:
    """A context manager of the user around a checkpointed forward."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def with_other_contexts(block: nn.Module, x: Tensor) -> Tensor:
    return kept_graph(block, x, context_fn=lambda: (Watched(), Watched()))


CALLS: dict[str, Call] = {
    "not reentrant": kept_graph,
    "reentrant": reentrant,
    "keywords": with_keywords,
    "tuples": partial(tuples, reentrant),
    "other ends": lambda block, x: x + kept_graph(lambda v: block(v).tanh(), x),
    "nested in reentrant": partial(nested, reentrant, kept_graph),
    "debug": in_debug_mode,
    "other contexts": with_other_contexts,
}


def wrapped(impl: CheckpointImpl) -> Net:
    model = Net(plainly)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)
    return model


def composed() -> Net:
    model = Net(plainly)
    for block in model.blocks:
        composable(block)
    return model


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def compiled(model: nn.Module, **options: Any) -> graphpp.Pipeline:
    x, target = data()
    example = graphpp.Microbatch((x[:2],), {}, target[:2])
    usual = {"split": 2, "schedule": "1F1B", "microbatches": MICROBATCHES, "example": example}
    return graphpp.compile(model, F.mse_loss, **(usual | options))


class Run(NamedTuple):
    """The gradients of one step, the operators that ran, and the bytes saved per microbatch."""

    grads: dict[str, Tensor | None]
    calls: Counter[str]
    saved: int


def run(model: nn.Module, **options: Any) -> Run:
    pipe, (x, target) = compiled(model, **options), data()
    with training.Counting() as counting:
        pipe.step(x, target=target)
    return Run(training.local_grads(pipe), counting.calls, sum(stage.saved_bytes for stage in pipe.plan.stages))


def of_eager(model: nn.Module) -> dict[str, Tensor | None]:
    x, target = data()
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        (F.mse_loss(model(part), wanted) / MICROBATCHES).backward()
    return {fqn: parameter.grad for fqn, parameter in model.named_parameters()}


@cache
def plain() -> Run:
    return run(Net(plainly))


def check(make: Callable[[], nn.Module], again: int = BLOCKS, **options: Any) -> None:
    """Gradients are eager's, `again` blocks run their forward twice, and fewer bytes are saved than without."""
    found = run(make(), **options)
    assert training.unequal(found.grads, of_eager(make())) == []
    assert found.calls["aten.convolution"] == (BLOCKS + again) * MICROBATCHES
    assert found.calls["aten.convolution_backward"] == BLOCKS * MICROBATCHES
    assert found.saved < plain().saved * (1 - 0.5 * again / BLOCKS)


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_inside_runs_again(name: str) -> None:
    check(lambda: Net(CALLS[name]))


@pytest.mark.parametrize("impl", CheckpointImpl)
def test_wrapped_modules(impl: CheckpointImpl) -> None:
    check(lambda: wrapped(impl))


def test_a_wrapped_model() -> None:
    """`checkpoint_wrapper` lists its parameters under the unwrapped model's FQNs."""
    check(lambda: checkpoint_wrapper(Net(plainly)))
    model = checkpoint_wrapper(Net(plainly))
    state = compiled(model).state_dict()
    assert state.keys() == Net(plainly).state_dict().keys()
    compiled(model).load_state_dict({fqn: value + 1 for fqn, value in state.items()})
    assert torch.equal(model.first.bias, Net(plainly).first.bias + 1)


def test_modules_checkpointed_by_hooks() -> None:
    check(composed)


def test_a_call_around_several_stages() -> None:
    """Each stage recomputes its own part of the call from the values that it received."""

    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.call(lambda v: self.blocks[1](self.blocks[0](v)), self.first(x)))

    check(lambda: Whole(kept_graph), split=["blocks.1"])
    check(lambda: Whole(reentrant), split=["blocks.1.down"], schedule="ZB1P")


@pytest.mark.parametrize("call", [kept_graph, reentrant])
def test_every_schedule_and_every_recompute(call: Call) -> None:
    """The model's checkpoints hold for all microbatches, even if the schedule names the microbatches that recompute."""
    some = graphpp.schedules.recompute_partially(make_table("1F1B", 1, 2, MICROBATCHES), 1)
    assert some.recomputed and len(some.recomputed) < 2 * MICROBATCHES
    plain()  # captured before `capturing_once`, since it is another graph
    with training.capturing_once():
        for schedule in ("GPipe", "ZB1P", some):
            check(lambda: Net(call), schedule=schedule)
        for recompute in ("full", ["blocks.1"], lambda node: False, graphpp.Recompute(weight_grad=True)):
            check(lambda: Net(call), schedule="ZB1P", memory=recompute)


def test_dropout_repeats_its_numbers() -> None:
    ending = partial(nested, reentrant, plainly)  # the backward of sin reads the dropout's result
    once, again = run(Net(partial(nested, plainly, plainly), 0.3)), run(Net(ending, 0.3), schedule="ZB1P")
    assert training.unequal(once.grads, again.grads) == []
    assert again.calls["aten.native_dropout"] == 2 * BLOCKS * MICROBATCHES


def every_second(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy with state: it counts the calls of each operator."""
    seen[operator] += 1
    saves = operator == convolution and seen[operator] % 2
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def by_shape(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return operator == convolution and args[0].shape[1] == WIDTH and ctx.op_output.shape[1] == 32


seen: Counter[Any] = Counter()

POLICIES: dict[str, tuple[Any, float]] = {  # and the number of runs of a block's convolution
    "nothing": ([], 2),
    "every second": (every_second, 1.5),
    "by shape": (by_shape, 1),
    "offload": (lambda ctx, operator, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD, 1),
    "all": (lambda ctx, operator, *args, **kwargs: CheckpointPolicy.PREFER_SAVE, 1),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_selective_checkpoint_saves_what_its_policy_says(name: str) -> None:
    policy, times = POLICIES[name]
    found = run(Net(partial(selected, policy)))
    assert training.unequal(found.grads, plain().grads) == []
    assert found.calls["aten.convolution"] == times * BLOCKS * MICROBATCHES
    assert name in ("all", "offload") or found.calls["aten.native_layer_norm"] == 2 * BLOCKS * MICROBATCHES
    assert found.saved < plain().saved or name in ("all", "offload")


def test_nothing_runs_again_where_nothing_is_trained() -> None:
    def under_no_grad(block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return kept_graph(block, x)

    assert run(Net(under_no_grad)).calls["aten.convolution"] == BLOCKS * MICROBATCHES
    pipe, (x, target) = compiled(Net(kept_graph)), data()
    pipe.eval(x, target=target)
    with training.Counting() as counting:
        pipe.eval(x, target=target)
    assert counting.calls["aten.convolution"] == BLOCKS * MICROBATCHES


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_hugging_face() -> None:
    found = []
    for again in (None, False, True):
        model, loss, batch = hf_llama_labels()
        if again is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": again})
        if again:
            model.enable_input_require_grads()
        pipe = graphpp.compile(model, loss, split=2, schedule="1F1B", microbatches=2)
        pipe.step(**batch.kwargs)
        with training.Counting() as counting:
            pipe.step(**batch.kwargs)
        found.append((training.local_grads(pipe), counting.calls["aten._scaled_dot_product_flash_attention_for_cpu"]))
    assert [training.unequal(grads, found[0][0]) for grads, _ in found] == [[], [], []]
    assert [attentions for _, attentions in found] == [4 * 2, 2 * 4 * 2, 2 * 4 * 2]


def test_the_plan_says_how_many() -> None:
    assert "the model checkpoints 2 calls" in repr(compiled(Net(kept_graph)))
    assert "checkpoints" not in repr(compiled(Net(plainly)))
