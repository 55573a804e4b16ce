"""State that changes between two steps: a new capture at once, or an error of the next audit; the old numbers never survive."""

import collections
import contextvars
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from graphpp import CaptureError
from graphpp.capture.watch.audit import Audit
from graphpp.capture.watch.operators import Operations
from tests.distributed import run_ranks
from tests.exhaustive import cases
from tests.internals import captures

WIDTH = 4


class Model(nn.Module):
    """Two layers, and a factor that subclasses read from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) * self.factor()


class Changing(NamedTuple):
    """A model and its loss, a change of state that they read, and the way back."""

    model: nn.Module
    loss: Callable[..., Tensor]
    change: Callable[[], Any]
    undo: Callable[[], Any] = lambda: None


def reading(factor: Callable[[], float], change: Callable[[], Any], undo: Callable[[], Any] = lambda: None) -> Changing:
    """A loss that reads a factor in the forward of the model and in the loss itself."""
    return Changing(Model(), lambda output, target: F.mse_loss(output, target) * factor(), change, undo)


class OfLoss(nn.Module):
    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("weight", torch.tensor(1.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.read(self.weight)


def number_of_a_loss_buffer() -> Changing:
    loss = OfLoss(Tensor.item)
    return Changing(Model(), loss, lambda: loss.weight.fill_(2.0))


def number_of_arithmetic_on_a_loss_buffer() -> Changing:
    loss = OfLoss(lambda weight: float(weight * 2 + 1))
    return Changing(Model(), loss, lambda: loss.weight.fill_(2.0))


def list_of_a_tensor() -> Changing:
    weights = torch.tensor([1.0, 2.0])
    return reading(lambda: weights.tolist()[0], lambda: weights.fill_(3.0))


def number_of_a_tensor_attribute() -> Changing:
    model = Model()
    model.weight = torch.tensor(1.0)  # type: ignore[assignment]
    model.factor = partial(lambda of: of.weight.item(), model)  # type: ignore[method-assign]
    return Changing(model, F.mse_loss, lambda: model.weight.fill_(2.0))  # type: ignore[operator]


class Hook:
    scale = 1.0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.scale


def dict_of_a_hook() -> Changing:
    model, state = Model(), {"k": 1.0}
    model.first.register_forward_hook(lambda module, args, output: output * state["k"])
    return Changing(model, F.mse_loss, partial(state.update, k=2.0))


def attribute_of_a_hook() -> Changing:
    model, hook = Model(), Hook()
    model.first.register_forward_hook(hook)
    return Changing(model, F.mse_loss, lambda: setattr(hook, "scale", 2.0))


def closure_of_a_method() -> Changing:
    factor = 1.0

    class OfClosure(Model):
        def factor(self) -> float:
            return factor

    def change() -> None:
        nonlocal factor
        factor = 2.0

    return Changing(OfClosure(), F.mse_loss, change)


def method_of_a_class() -> Changing:
    kind = type("Kind", (Model,), {})
    return Changing(kind(), F.mse_loss, lambda: setattr(kind, "factor", lambda self: 2.0))


def class_of_the_model() -> Changing:
    model = Model()
    other = type("Other", (Model,), {"factor": lambda self: 2.0})
    return Changing(model, F.mse_loss, lambda: setattr(model, "__class__", other))


def forward_of_a_module_of_torch() -> Changing:
    forward = nn.Linear.forward
    double = lambda self, x: forward(self, x) * 2  # noqa: E731
    return Changing(
        Model(), F.mse_loss, lambda: setattr(nn.Linear, "forward", double), lambda: setattr(nn.Linear, "forward", forward)
    )


class Settings:
    """State in attributes of a class."""

    number, mapping, items = 1.0, {"k": 1.0}, [1.0]
    one: "Settings | None" = None

    @classmethod
    def get(cls) -> "Settings":
        cls.one = cls.one or cls()
        return cls.one


def in_class(name: str, read: Callable[[], float], change: Callable[[], Any]) -> Callable[[], Changing]:
    def made() -> Changing:
        Settings.number, Settings.mapping, Settings.items, Settings.one = 1.0, {"k": 1.0}, [1.0], Settings()
        return reading(read, change)

    made.__name__ = name
    return made


def number_of_the_class_of_an_attribute() -> Changing:
    kind = type("Kind", (), {"k": 1.0})
    model = type("OfOptions", (Model,), {"factor": lambda self: self.options.k})()
    model.options = kind()
    return Changing(model, F.mse_loss, lambda: setattr(kind, "k", 2.0))


class Outside(nn.Module):
    """A module outside of the tree of model and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.flag = 1.0, False
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.k * self.weight * (3.0 if self.flag else 1.0)


def outside(change: Callable[[list[Outside]], Any]) -> Callable[[], Changing]:
    def made() -> Changing:
        held = [Outside()]
        return Changing(Model(), lambda output, target: F.mse_loss(held[0](output), target), lambda: change(held))

    return made


def other_module(held: list[Outside]) -> None:
    held[0] = Outside()
    held[0].k = 2.0


def assigned(held: list[Outside]) -> None:
    held[0].load_state_dict({"weight": torch.full((WIDTH,), 2.0)}, assign=True)


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
ACTIVATIONS = {"act": torch.relu}


def variable_of_context() -> Changing:
    VARIABLE.set(1.0)
    return reading(lambda: VARIABLE.get(1.0), lambda: VARIABLE.set(2.0))


def bound_method_of_a_dict() -> Changing:
    state = {None: 1.0}
    return reading(partial(state.get, None), lambda: state.update({None: 2.0}))


def learning_rate() -> Changing:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return reading(lambda: optimizer.param_groups[0]["lr"], lambda: optimizer.param_groups[0].update(lr=2.0))


def local_of_a_thread() -> Changing:
    state = threading.local()
    state.k = 1.0
    return reading(lambda: state.k, lambda: setattr(state, "k", 2.0))


def dict_of_a_user() -> Changing:
    state = collections.UserDict(k=1.0)
    return reading(lambda: state["k"], lambda: state.update(k=2.0))


def registry_of_functions() -> Changing:
    ACTIVATIONS["act"] = torch.relu
    loss = lambda output, target: F.mse_loss(ACTIVATIONS["act"](output), target)  # noqa: E731
    return Changing(Model(), loss, lambda: ACTIVATIONS.update(act=torch.tanh))


def array() -> Changing:
    values = np.ones(WIDTH, dtype=np.float32)
    return reading(lambda: float(values[0]), lambda: values.fill(2.0))


def tensor_in_a_closure() -> Changing:
    state = SimpleNamespace(weight=torch.ones(WIDTH))
    loss = lambda output, target: F.mse_loss(output * state.weight, target)  # noqa: E731
    return Changing(Model(), loss, lambda: setattr(state, "weight", torch.full((WIDTH,), 2.0)))


def backward_of_a_function() -> Changing:
    state = {"k": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * state["k"]

    loss = lambda output, target: F.mse_loss(Scaled.apply(output), target)  # noqa: E731
    return Changing(Model(), loss, lambda: state.update(k=2.0))


def flag_of_torch() -> Changing:
    def set_flag(value: bool) -> None:
        torch.backends.cudnn.benchmark = value

    return reading(lambda: 1.0 + torch.backends.cudnn.benchmark, lambda: set_flag(True), lambda: set_flag(False))


def hook_on_all_modules() -> Changing:
    handles: list[Any] = []
    double = lambda module, args, output: output * 2 if type(module) is nn.Linear else None  # noqa: E731
    register = nn.modules.module.register_module_forward_hook
    return Changing(
        Model(), F.mse_loss, lambda: handles.append(register(double)), lambda: [each.remove() for each in handles]
    )


def environment() -> Changing:
    os.environ["FACTOR_OF_TEST"] = "1"
    return reading(lambda: float(os.environ["FACTOR_OF_TEST"]), lambda: os.environ.update(FACTOR_OF_TEST="2"))


def attribute_by_a_name_made_at_run_time() -> Changing:
    model = type("OfName", (Model,), {"factor": lambda self: getattr(self, "".join(["fac", "tor_"]))})()
    model.factor_ = 1.0
    return Changing(model, F.mse_loss, lambda: setattr(model, "factor_", 2.0))


FOLLOWED = (
    dict_of_a_hook,
    attribute_of_a_hook,
    closure_of_a_method,
    method_of_a_class,
    class_of_the_model,
    in_class("number", lambda: Settings.number, lambda: setattr(Settings, "number", 2.0)),
    in_class("dict", lambda: Settings.mapping["k"], lambda: Settings.mapping.update(k=2.0)),
    in_class("list", lambda: Settings.items[0], lambda: Settings.items.__setitem__(0, 2.0)),
    in_class("singleton", lambda: Settings.get().number, lambda: setattr(Settings.get(), "number", 2.0)),
    number_of_the_class_of_an_attribute,
    outside(lambda held: setattr(held[0], "k", 2.0)),
    outside(lambda held: setattr(held[0], "flag", True)),
    outside(assigned),
    outside(other_module),
    variable_of_context,
    learning_rate,
    local_of_a_thread,
    dict_of_a_user,
    registry_of_functions,
    array,
    tensor_in_a_closure,
    backward_of_a_function,
)
AUDITED = (
    number_of_a_loss_buffer,
    number_of_arithmetic_on_a_loss_buffer,
    list_of_a_tensor,
    number_of_a_tensor_attribute,
    forward_of_a_module_of_torch,
    bound_method_of_a_dict,
    flag_of_torch,
    hook_on_all_modules,
    environment,
    attribute_by_a_name_made_at_run_time,
)
AT_ONCE = (number_of_a_loss_buffer, number_of_arithmetic_on_a_loss_buffer, number_of_a_tensor_attribute)
X, TARGET = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.fixture
def changing(request: pytest.FixtureRequest) -> Iterator[Changing]:
    torch.manual_seed(0)
    found = request.param()
    yield found
    found.undo()


def numbers(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def eager(of: Changing) -> list[Tensor]:
    of.model.zero_grad()
    loss = of.loss(of.model(X), TARGET)
    loss.backward()
    return numbers(of.model, loss)


class Stepped:
    def __init__(self, of: Changing, audit: int | None = None) -> None:
        debug = graphpp.Debug(audit=audit)
        self._of, self.pipe = of, graphpp.compile(of.model, of.loss, split=1, microbatches=1, debug=debug)

    def step(self) -> list[Tensor]:
        self._of.model.zero_grad()
        loss = self.pipe.step(X, target=TARGET).loss
        assert loss is not None
        return numbers(self._of.model, loss)


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    torch.testing.assert_close([each.clone() for each in ours], theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("changing", cases(FOLLOWED, *FOLLOWED[::3]), indirect=True)
def test_a_change_that_is_watched_is_followed_at_once(changing: Changing) -> None:
    stepped = Stepped(changing, audit=0)
    before = [each.clone() for each in stepped.step()]
    assert_same(before, eager(changing))
    changing.change()
    after = eager(changing)
    with pytest.raises(AssertionError):
        assert_same(before, after)
    after = [each.clone() for each in after]
    assert_same(stepped.step(), after)


@pytest.mark.parametrize("changing", cases(AUDITED, *AUDITED[::2]), indirect=True)
def test_any_other_change_is_an_error_of_the_next_audit_until_a_capture(changing: Changing) -> None:
    stepped = Stepped(changing)
    for _ in range(2):
        stepped.step()
    changing.change()
    with pytest.raises(CaptureError, match=r"compute something else than at their capture: operator .* call 2 of this graph"):
        for _ in range(2):
            stepped.step()
    with pytest.raises(CaptureError, match="compute something else"):
        stepped.step()
    stepped.pipe.recapture()
    after = [each.clone() for each in eager(changing)]
    assert_same(stepped.step(), after)


@pytest.mark.parametrize("changing", AT_ONCE, indirect=True)
def test_a_tensor_of_which_the_code_read_a_number_is_audited_when_it_is_written(changing: Changing) -> None:
    stepped = Stepped(changing, audit=1_000)
    stepped.step()
    changing.change()
    with pytest.raises(CaptureError, match=r"test_audit.py:\d+, was aten.mul.Tensor\(%\d+.0, [13].0\) and is .*, [25].0\)"):
        stepped.step()


def changed_on_one_rank(rank: int) -> str:
    os.environ["FACTOR_OF_TEST"] = "1"
    torch.manual_seed(0)
    model = nn.Sequential(Model(), Model())
    loss = lambda output, target: F.mse_loss(output, target) * float(os.environ["FACTOR_OF_TEST"])  # noqa: E731
    pipe = graphpp.compile(model, loss, split=["1"], schedule="1F1B", microbatches=2, debug=graphpp.Debug(audit=1))
    pipe.step(X, target=TARGET)
    os.environ["FACTOR_OF_TEST"] = "2"
    with pytest.raises(graphpp.GraphPPError) as raised:
        pipe.step(X, target=TARGET)
    pipe.recapture()
    pipe.step(X, target=TARGET)
    return str(raised.value)


def test_a_difference_is_an_error_on_all_ranks() -> None:
    assert all("compute something else than at their capture" in text for text in run_ranks(changed_on_one_rank, 2))


class Noting:
    """Stands in for a run of forward and loss; `at`: the calls at which it ran. `seconds` of one run, on a clock of its own."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now, self.call, self.at, self._seconds = 0.0, 1, list[int](), seconds

    def __call__(self) -> Operations:
        self.now += self._seconds
        self.at.append(self.call)
        return Operations((), ())

    def calls(self, audit: Audit, until: int) -> list[int]:
        """The calls that were audited, each of which takes a second."""
        for self.call in range(2, until):
            self.now += 1.0
            audit.check()
        return self.at


def test_audits_double_their_distance_and_end_at_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    noting = Noting(0.1)
    monkeypatch.setattr("graphpp.capture.watch.audit.time.perf_counter", lambda: noting.now)
    audited = noting.calls(Audit(noting), 1_000)
    assert audited[:6] == [1, 2, 4, 8, 16, 32]
    # An audit takes a tenth of a call, so 20 calls pay for it, or 21 where the quotient is rounded up: 0.1 / (0.005 * 1.0).
    assert {later - earlier for earlier, later in itertools.pairwise(audited[5:])} <= {20, 21}
    assert audited[-1] > 970


@pytest.mark.parametrize(("every", "audited"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6])])
def test_audit_sets_how_often(every: int, audited: list[int]) -> None:
    noting = Noting()
    assert noting.calls(Audit(noting, every), 7) == audited


class Loop:
    """A training loop with a loss, a counter that the code names, and a class of its own."""

    def __init__(self) -> None:
        self.scale, self.calls = 2.0, 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * (self.scale if self.calls >= 0 else 0)


def test_state_behind_an_unwatched_object_causes_no_capture_but_an_error_if_it_counts() -> None:
    loop, x = graphpp.unwatched(Loop()), torch.randn(4, WIDTH)
    pipe = graphpp.compile(Model(), loop.loss, microbatches=2, debug=graphpp.Debug(audit=1))
    with captures() as made:
        for loop.calls in range(3):
            pipe.step(x, target=x)
        assert len(made) == 1
        loop.scale = 3.0
        with pytest.raises(CaptureError, match="compute something else"):
            pipe.step(x, target=x)
    with pytest.raises(graphpp.GraphPPError, match="a dict has no weak references"):
        graphpp.unwatched({})
