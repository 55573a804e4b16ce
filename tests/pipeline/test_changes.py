"""What happens between steps or behind the graph's back: it is followed, or refused, and never trains something else."""

import copy
import gc
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphpp
from tests import internals

X, Y = torch.randn(8, 8), torch.randn(8, 8)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8))


def eager_grads(model: nn.Module, microbatches: int = 4) -> dict[str, Tensor | None]:
    model = copy.deepcopy(model)
    for x, y in zip(X.chunk(microbatches), Y.chunk(microbatches), strict=True):
        (F.mse_loss(model(x), y) / microbatches).backward()
    return {fqn: p.grad for fqn, p in model.named_parameters()}


def assert_like_eager(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, expected[fqn]), fqn


class HooksInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad * 2)
        return y


def hooked(register: Callable[[nn.Parameter], Any]) -> nn.Module:
    model = two_layers()
    register(model[2].weight)
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (hooked(lambda p: p.register_hook(torch.zeros_like)), "2.weight"),
        (nn.Sequential(HooksInside(8, 8)), "test_changes.py"),
    ],
)
def test_gradient_hooks_are_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(graphpp.CaptureError, match=says):
        graphpp.compile(model, F.mse_loss).step(X, target=Y)


class HooksAtFirstCall(nn.Linear):
    """Installs a forward hook when it is first called, as transformers does to collect router logits."""

    installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.register_forward_hook(lambda module, args, output: 2 * output)
            self.installed = True
        return super().forward(x)


def test_a_hook_that_the_forward_registers_does_not_outlive_the_capture() -> None:
    model = nn.Sequential(HooksAtFirstCall(8, 8), nn.Linear(8, 8))
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    with internals.captures() as made:
        for _ in range(3):
            pipe.step(X, target=Y)
    assert len(made) == 1
    assert not model[0]._forward_hooks and not model[0].installed


def test_two_parameters_in_one_memory_are_refused() -> None:
    model = two_layers()
    model[2].weight.data = model[0].weight.data
    with pytest.raises(graphpp.CaptureError, match=r"0\.weight and 2\.weight"):
        graphpp.compile(model, F.mse_loss).step(X, target=Y)


def untie(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.randn(8, 8))


def exchange(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 8)


def tie(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


@pytest.mark.parametrize(("tied", "change"), [(True, untie), (False, tie), (False, exchange), (True, exchange)])
def test_another_structure_is_refused(tied: bool, change: Callable[[nn.Sequential], None]) -> None:
    model = two_layers()
    if tied:
        tie(model)
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    pipe.step(X, target=Y)
    change(model)
    with pytest.raises(graphpp.GraphPPError, match="changed after"):
        pipe.step(X, target=Y)


def test_a_replaced_parameter_is_followed() -> None:
    model = two_layers()
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    pipe.step(X, target=Y)
    model.zero_grad()
    model[0].weight = nn.Parameter(torch.randn(8, 8))
    expected = eager_grads(model)
    pipe.step(X, target=Y)
    assert_like_eager(model, expected)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8, 8))
        self.register_buffer("gain", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x @ self.scale).sigmoid() * self.gain)


LAYOUTS: list[Callable[[Any], Any]] = [
    lambda model: setattr(model.inner.weight, "data", model.inner.weight.data.t().contiguous().t()),
    lambda model: setattr(model.scale, "data", torch.rand(8, 16)[:, ::2]),
    lambda model: setattr(model, "scale", torch.rand(8, 8).t()),
    lambda model: setattr(model, "gain", torch.rand(1)),
]


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # autograd's own note on the weight that is turned
@pytest.mark.parametrize("change", LAYOUTS)
def test_another_layout_of_a_parameter_or_buffer_is_followed(change: Callable[[Any], Any]) -> None:
    """A compiler's code reads memory by the strides that it was told."""
    torch.manual_seed(0)
    model = Turned()
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4, backend=laid_out, gradients=graphpp.Gradients(fused=False))
    pipe.step(X, target=Y)
    model.zero_grad()
    change(model)
    expected = eager_grads(model)
    pipe.step(X, target=Y)
    assert_like_eager(model, expected)


def laid_out(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """A backend that takes only what it was compiled for."""

    def run(*inputs: Tensor) -> Any:
        for given, example in zip(inputs, examples, strict=True):
            assert (given.dtype, given.shape, given.stride()) == (example.dtype, example.shape, example.stride())
        return module(*inputs)

    return run


class Weighted:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.scale

    def bound(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


def by_closure() -> tuple[Any, Callable[[], None]]:
    scale = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * scale

    def change() -> None:
        nonlocal scale
        scale = 3.0

    return loss, change


def by_default() -> tuple[Any, Callable[[], None]]:
    def loss(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        return F.mse_loss(output, target) * scale

    return loss, lambda: setattr(loss, "__defaults__", (3.0,))


def by_object() -> tuple[Any, Callable[[], None]]:
    loss = Weighted()
    return loss, lambda: setattr(loss, "scale", 3.0)


@pytest.mark.parametrize("make", [by_closure, by_default, by_object])
def test_another_value_in_the_loss_is_followed(make: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    loss, change = make()
    pipe = graphpp.compile(two_layers(), loss, microbatches=4)
    before = pipe.step(X, target=Y).losses
    change()
    torch.testing.assert_close(pipe.step(X, target=Y).losses, before * 3)


class Assigning(nn.Module):
    """Has what a forward may change."""

    made = 0

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("h", None)
        self.register_buffer("seen", torch.zeros(8))
        self.n, self.share = 0, 0.5
        self.counts, self.states, self.memory = {"n": 0}, [torch.zeros(8)], {"h": torch.zeros(8)}
        self.log: list[Tensor] = []
        self.mask = torch.ones(8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        added = self.change(self, y)
        return y if added is None else y + added


def increase(module: Any, name: str) -> None:
    setattr(module, name, getattr(module, name) + 1)


def remember(module: Any, y: Tensor) -> Tensor:
    before, module.states[0] = module.states[0], y.detach()[0]
    return before + 1


def append(module: Any, y: Tensor) -> Tensor:
    module.states.append(y.detach()[0])
    return module.states[-2] + 1


def memorise(module: Any, y: Tensor) -> Tensor:
    before, module.memory["h"] = module.memory["h"], y.detach()[0]
    return before + 1


ASSIGNMENTS: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, y: increase(m, "n") or y * m.n, r"changes inner\.n.* buffer"),
    (lambda m, y: increase(m, "share"), r"changes inner\.share.* buffer"),
    (lambda m, y: increase(m, "made") or y * (m.made > 9), r"changes inner\.made.* buffer"),
    (lambda m, y: (m.share, setattr(m, "share", y.sum()))[0], r"changes inner\.share.* buffer"),
    (lambda m, y: m.counts.update(n=m.counts["n"] + 1) or y * m.counts["n"], r"changes inner\.counts\.n.* buffer"),
    (remember, r"reads the tensor inner\.states\.0 and replaces it"),
    (append, r"keeps a tensor of one call in inner\.states\.1, where there was none"),
    (memorise, r"reads the tensor inner\.memory\.h and replaces it"),
]


def assert_untouched(model: Assigning) -> None:
    assert (model.n, model.share, model.made, model.counts, model.h, model.log) == (0, 0.5, 0, {"n": 0}, None, [])
    tensors = [*model.states, *model.memory.values(), model.seen]
    assert len(tensors) == 3 and all(type(held) is Tensor and not held.any() for held in tensors)


@pytest.mark.parametrize(("change", "says"), ASSIGNMENTS)
def test_an_assignment_that_no_graph_can_follow_is_refused(change: Callable[[Any, Tensor], Any], says: str) -> None:
    model = nn.Sequential(OrderedDict(inner=Assigning(change)))
    with pytest.raises(graphpp.CaptureError, match=says):
        graphpp.compile(model, F.mse_loss).step(X, target=Y)
    assert_untouched(model.inner)


def test_a_list_that_the_forward_fills_holds_nothing_afterwards() -> None:
    model = Assigning(lambda m, y: m.log.append(y))
    graphpp.compile(model, F.mse_loss, microbatches=4).step(X, target=Y)
    assert_untouched(model)


class Beside(torch.autograd.Function):
    """Does something to a module in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any, change: Callable[[Any, Tensor], Any]) -> Tensor:
        ctx.held = module, change
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        module, change = ctx.held
        change(module, grad)
        return grad, None, None


IN_BACKWARD: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda m, g: setattr(m, "seen", g.detach().sum(0)), r"autograd\.Function assigns seen"),
    (lambda m, g: setattr(m, "mask", g.detach().sum(0)), r"autograd\.Function assigns mask"),
    (lambda m, g: m.states.__setitem__(0, g.detach().sum(0)), r"autograd\.Function assigns states\.0"),
    (lambda m, g: increase(m, "n"), "number n"),
    (lambda m, g: random.random(), "draws random numbers from Python's `random`"),
    (lambda m, g: np.random.rand(), "draws random numbers from `numpy.random`"),
]


@pytest.mark.parametrize(("change", "says"), IN_BACKWARD)
def test_what_a_backward_does_beside_its_gradient_is_refused(change: Callable[[Any, Tensor], Any], says: str) -> None:
    model = Assigning(lambda m, y: None)
    model.forward = lambda x: Beside.apply(model.inner(x), model, change)
    seen, state = model.seen, random.getstate()
    with pytest.raises(graphpp.CaptureError, match=says):
        graphpp.compile(model, F.mse_loss).step(X, target=Y)
    assert model.seen is seen and random.getstate() == state
    assert_untouched(model)


def test_what_a_backward_notes_is_undone() -> None:
    model = Assigning(lambda m, y: None)
    model.forward = lambda x: Beside.apply(model.inner(x), model, lambda m, g: m.log.append(g))
    graphpp.compile(model, F.mse_loss).step(X, target=Y)
    assert model.log == []


GENERATORS: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (random.Random(0), lambda g: g.random(), lambda g: g.getstate()),
    (np.random.default_rng(0), lambda g: g.random(), lambda g: str(g.bit_generator.state)),
    (np.random.Generator(np.random.MT19937(0)), lambda g: g.random(), lambda g: str(g.bit_generator.state)),
    (np.random.RandomState(0), lambda g: g.rand(), lambda g: str(g.get_state())),
]


@pytest.mark.parametrize(("generator", "draw", "state"), GENERATORS)
def test_a_generator_that_a_module_holds_is_not_frozen(
    generator: Any, draw: Callable[[Any], Any], state: Callable[[Any], Any]
) -> None:
    model = nn.Sequential(Assigning(lambda m, y: float(draw(m.generator))), nn.Linear(8, 8))
    model[0].generator = generator
    before = state(generator)
    with pytest.raises(graphpp.CaptureError, match=r"generator 0\.generator"):
        graphpp.compile(model, F.mse_loss).step(X, target=Y)
    assert state(generator) == before


class Reread(nn.Module):
    """The gradient of `whole` is read again, through a view, after it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(8, 8, 1) * 0.3)
        self.left, self.right = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.whole + (self.right @ self.left).view(8, 8, 1)
        return self.out(torch.tanh(F.conv1d(x.unsqueeze(-1), weight).squeeze(-1)))


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS"])
def test_a_gradient_is_not_added_to_while_it_is_read(schedule: str) -> None:
    torch.manual_seed(0)
    model = Reread()
    expected = eager_grads(model)
    graphpp.compile(model, F.mse_loss, split=["out"], schedule=schedule, microbatches=4).step(X, target=Y)
    assert_like_eager(model, expected)


def test_outputs_of_an_evaluation_are_handed_over() -> None:
    pipe = graphpp.compile(two_layers(), F.mse_loss, microbatches=4)
    out = pipe.eval(X)
    held = weakref.ref(out.output)
    tensors = sum(t.shape == (2, 8) for t in gc.get_objects() if type(t) is Tensor)
    del out
    assert held() is None
    pipe.eval(X)
    gc.collect()
    assert sum(t.shape == (2, 8) for t in gc.get_objects() if type(t) is Tensor) <= tensors


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("row", ["0F0 0I0 0W0", "0UNSHARD 0F0 0B0 0RESHARD", "0F0 0B0 0REDUCE_GRAD"])
def test_actions_that_torch_writes_into_its_tables_run(row: str) -> None:
    plain, other = two_layers(), two_layers()
    other.load_state_dict(plain.state_dict())
    graphpp.compile(plain, F.mse_loss, schedule=["0F0 0B0"], microbatches=1).step(X, target=Y)
    graphpp.compile(other, F.mse_loss, schedule=[row], microbatches=1).step(X, target=Y)
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


class Named(nn.Sequential):
    """Reads `scale` in its forward, and neither `step` nor `name`."""

    def __init__(self) -> None:
        super().__init__(*two_layers())
        self.scale, self.step, self.name = 1.0, 0, "first"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_only_attributes_that_the_code_reads_cause_a_capture_which_the_log_explains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Named()
    caplog.set_level("INFO", "graphpp")
    counts = []
    with internals.captures() as captured:
        pipe = graphpp.compile(model, F.mse_loss, split=1, microbatches=4)
        for step in range(6):
            model.step, model.name, model.scale = step, str(step), 1.0 + step // 3 + step // 5
            pipe.step(X, target=Y)
            counts.append(len(captured))
    assert counts == [1, 1, 1, 2, 2, 3]
    assert caplog.text.count("captured again, because model.scale changed") == 1
