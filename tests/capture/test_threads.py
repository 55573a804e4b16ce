"""One thread captures while other threads train: the other threads run as if they were alone, and captures take turns.

`elsewhere` runs a function in another thread and waits for it. Where the traced model or its custom Function calls
`elsewhere`, the other thread works at exactly that point of the trace.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import random as imported_draw
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphpp
from graphpp.backends.regions import Regions
from graphpp.errors import CaptureError, GraphPPError
from graphpp.passes.graph.joint_graph import JointGraph
from tests.other_thread import WAIT, elsewhere
from tests.passes.graphs import captured

# Dynamo, which reads the branches of `torch.cond`, looks at `.grad` of every tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SHORT = 0.5  # seconds in which a thread that is not stopped would have come in


class Square(torch.autograd.Function):
    """x², which calls `visit` in its forward and its backward."""

    visit: Callable[[str], None] = staticmethod(lambda place: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        Square.visit("forward of a Function")
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        Square.visit("backward of a Function")
        return 2 * x * grads[0]


class Everything(nn.Module):
    """A checkpoint, a custom Function, an LSTM, a distribution, a condition; calls `visit` in the forward."""

    def __init__(self, visit: Callable[[str], None] = lambda place: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.visit: Callable[[str], None] = visit

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False)
        x = torch.cond(x.sum() > 0, lambda t: t * max(1, 2), lambda t: t * math.pow(2.0, 0.5), (x,))
        x = torch.distributions.Normal(x, 1.0).rsample()
        return self.last(self.lstm(Square.apply(x))[0])

    def inner(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.visit("forward")
        return x.tanh()


def the_input() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(2, 3, 4)


@contextmanager
def visiting(visit: Callable[[str], None]) -> Iterator[None]:
    Square.visit = staticmethod(visit)
    try:
        yield
    finally:
        Square.visit = staticmethod(lambda place: None)


def capture_with(visit: Callable[[str], None], before: Callable[[], None] = lambda: None) -> JointGraph:
    """Capture a model that calls `visit` once in each place: both passes of the Function, and the forward of a module."""
    seen, thread = set[str](), threading.get_ident()

    def once(place: str) -> None:
        if place not in seen and threading.get_ident() == thread:  # the other thread applies the Function too
            seen.add(place)
            visit(place)

    model = Everything(once)
    with visiting(once):
        before()
        joint = captured(model, the_input())
    assert seen == {"forward", "forward of a Function", "backward of a Function"}
    return joint


def same(found: Any, expected: Any) -> bool:
    """Whether nested lists and tuples of tensors and plain values are equal, tensors by their bits."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected) if isinstance(expected, Tensor) else bool(found == expected)


def text(joint: JointGraph) -> list[str]:
    return [f"{node.format_node()} {node.meta.get('calls')} {node.meta.get('checkpoint')}" for node in joint.graph.nodes]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.linear, self.conv = nn.Linear(4, 4), nn.Conv1d(3, 3, 3, padding=1)
        self.lstm, self.norm = nn.LSTM(4, 4, batch_first=True), nn.BatchNorm1d(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-1, 1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lstm(self.conv(self.linear(x)))[0])


def gradients_of(function: Callable[[Block, Tensor], Tensor]) -> list[Tensor]:
    """The value of a function of a model and an input, and its gradients."""
    block, x = Block(), the_input().requires_grad_()
    value = function(block, x).square().sum()
    value.backward()
    grads = [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
    assert x.grad is not None
    return [value.detach(), x.grad, *grads]


def plain() -> Any:
    return gradients_of(lambda block, x: block(x))


def function() -> Any:
    return gradients_of(lambda block, x: Square.apply(block(x)))


def checkpointed(**how: Any) -> Any:
    """The gradients, and how often the checkpointed function ran."""
    runs: list[int] = []

    def run(block: Block, x: Tensor) -> Tensor:
        runs.append(1)
        return block(x)

    return gradients_of(lambda block, x: checkpoint(run, block, x, **how)), len(runs)


def kept_graph() -> Any:
    return checkpointed(use_reentrant=False)


def reentrant() -> Any:
    return checkpointed(use_reentrant=True)


def selective() -> Any:
    """The gradients, and the operators for which the policy was asked."""
    asked: list[str] = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(str(operator))
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(use_reentrant=False, context_fn=contexts), asked


def hooks() -> Any:
    """The gradients that a hook has changed, and the names of autograd nodes."""
    names: list[str] = []

    def run(block: Block, x: Tensor) -> Tensor:
        y = block.linear(x)
        y.register_hook(lambda grad: grad * 2)
        assert y.grad_fn is not None
        names.append(y.grad_fn.name())
        return y

    return gradients_of(run), names


def freezing() -> Any:
    """Attributes of a parameter after the code has set them."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.requires_grad_(False)
    flags = [parameter.requires_grad]
    parameter.requires_grad = True
    parameter.data = torch.zeros(3)
    own = parameter.data.data_ptr() == parameter.data_ptr()
    return [*flags, parameter.requires_grad, parameter.shape, own, parameter.data]


def inference() -> Any:
    with torch.inference_mode():
        return torch.ones(1).is_inference(), torch.is_inference_mode_enabled()


def inner_gradients() -> Any:
    x = torch.ones(2, requires_grad=True)
    return torch.autograd.grad((x**3).sum(), x)[0], torch.func.grad(lambda v: (v**3).sum())(torch.ones(2))


def distributions() -> Any:
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def queries() -> Any:
    """The answers that code of torch gets, for instance an optimizer."""
    asking = compile("torch.compiler.is_compiling(), torch.compiler.is_exporting()", str(torch.__file__), "eval")
    return eval(asking)


def builtin_functions() -> Any:
    one, two = torch.ones(()), torch.full((), 2.0)
    return max(one, two) is two, min(one, two) is one, type(math.pow(2, 3))


def kernels() -> Any:
    return torch.backends.cudnn.enabled, torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled()


def compiled() -> Any:
    return COMPILED(the_input())


COMPILED = torch.compile(lambda x: x.sin() + 1, backend="eager")

ACTIONS: list[Callable[[], Any]] = [
    *(plain, function, kept_graph, reentrant, selective, hooks, freezing, inference, inner_gradients, distributions),
    *(queries, builtin_functions, kernels, compiled),
]


@pytest.fixture
def _checked_distributions() -> Iterator[None]:
    """Distributions check their arguments; the import of Dynamo switches that off."""
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(False)


def done_elsewhere() -> dict[str, Any]:
    """What each action gives in another thread."""
    return {action.__name__: elsewhere(action) for action in ACTIONS}


@pytest.mark.usefixtures("_checked_distributions")
def test_another_thread_works_as_if_nobody_captured() -> None:
    alone, found = done_elsewhere(), []
    capture_with(lambda place: found.append(done_elsewhere()))
    assert len(found) == 3
    assert [name for each in found for name, value in each.items() if not same(value, alone[name])] == []


def test_what_another_thread_calls_is_not_in_the_graph() -> None:
    alone = text(captured(Everything(), the_input()))
    meanwhile = capture_with(lambda place: elsewhere(lambda: (plain(), function(), selective())))
    assert text(meanwhile) == alone


def test_draws_of_another_thread_are_neither_refused_nor_taken_back() -> None:
    def draw() -> list[float]:
        return [random.random(), imported_draw(), float(np.random.rand()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = [draw() for _ in range(4)]
    found: list[list[float]] = []
    capture_with(lambda place: found.append(elsewhere(draw)), before=seed)
    found.append(draw())
    assert found == expected


@pytest.mark.parametrize("draw", ["random.random()", "imported_draw()", "float(np.random.rand())"])
def test_draws_of_the_model_are_refused_also_while_another_thread_is_alive(draw: str) -> None:
    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * eval(draw)

    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(WAIT,))
    thread.start()
    try:
        with pytest.raises(CaptureError, match=r"draws random numbers from .*random` at .*test_threads.py"):
            captured(Drawing(4, 4), the_input())
    finally:
        done.set()
        thread.join()


def test_dynamo_knows_what_a_trace_replaced() -> None:
    """The start of a process group empties Dynamo's tables of functions, and the next capture may be what fills them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    captured(Everything(), the_input())
    power = torch.compile(lambda x: x * math.pow(2.0, 0.5), backend="eager", fullgraph=True)
    assert torch.equal(power(the_input()), the_input() * math.pow(2.0, 0.5))


def test_a_call_of_the_captured_model_in_another_thread_is_refused() -> None:
    refused: list[str] = []

    def visit() -> None:
        for module in (model, model.last):
            with pytest.raises(GraphPPError, match="while another thread captures the same model") as error:
                elsewhere(partial(module, the_input()))
            refused.append(str(error.value))

    model = Everything(lambda place: visit() if not refused else None)
    captured(model, the_input())
    assert "a thread calls the model (Everything)" in refused[0] and "calls the module last (Linear)" in refused[1]
    model(the_input()).sum().backward()


def test_a_step_of_the_captured_model_in_another_thread_is_refused() -> None:
    refused: list[str] = []

    def visit() -> None:
        with pytest.raises(GraphPPError, match="steps a pipeline while another thread captures the same model") as error:
            elsewhere(lambda: other.step(x, target=x))
        refused.append(str(error.value))

    model = Everything(lambda place: visit() if not refused else None)
    x = the_input()
    other = graphpp.compile(model, nn.functional.mse_loss)
    graphpp.compile(model, nn.functional.mse_loss).step(x, target=x)
    assert refused
    other.step(x, target=x)


def both(first: Callable[[], Any], second: Callable[[], Any], inside: threading.Event) -> tuple[Any, Any]:
    """The results of two threads; the second one begins once the first one is inside of its work."""
    results: list[Any] = [None, None]
    works = enumerate((first, second))
    threads = [threading.Thread(target=lambda at=at, work=work: results.__setitem__(at, work())) for at, work in works]
    threads[0].start()
    assert inside.wait(WAIT)
    threads[1].start()
    for thread in threads:
        thread.join(WAIT)
    return results[0], results[1]


def meeting() -> tuple[threading.Event, list[bool], Callable[[str], None], Callable[[str], None]]:
    """Two visits for two threads: the first one waits for the second thread, and notes whether it came in as well."""
    inside, came, met = threading.Event(), threading.Event(), list[bool]()

    def first(place: str = "") -> None:
        if not inside.is_set():
            inside.set()
            met.append(came.wait(SHORT))

    return inside, met, first, lambda place="": came.set()


def test_two_captures_take_turns_and_make_the_graphs_that_they_make_alone() -> None:
    class Other(nn.Module):
        def __init__(self, visit: Callable[[str], None] = lambda place: None) -> None:
            super().__init__()
            self.first, self.body = nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4))
            self.visit = visit

        def forward(self, x: Tensor) -> Tensor:
            self.visit("forward")
            return checkpoint(self.body, self.first(x), use_reentrant=True)

    inside, met, wait, come = meeting()
    alone = text(captured(Everything(), the_input())), text(captured(Other(), the_input()))
    model, other = Everything(wait), Other(come)
    results = both(lambda: text(captured(model, the_input())), lambda: text(captured(other, the_input())), inside)
    assert met == [False] and results == alone


def test_compilations_of_regions_take_turns() -> None:
    inside, met, wait, come = meeting()

    def compile_with(visit: Callable[[str], None]) -> None:
        class Region:
            key = title = "region"
            sizes = ()

        class Call:
            region, values = Region(), None

        Regions(lambda region: visit("")).compile(Call())  # type: ignore[arg-type, return-value, func-returns-value]

    both(partial(compile_with, wait), partial(compile_with, come), inside)
    assert met == [False]
