"""Arguments that mean nothing end in a `GraphPPError` at every public function, within seconds, and never in a bare error.

Random arguments are drawn for each parameter of each public function: values that may be right, and values that cannot be.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import graphpp
from graphpp import schedules
from tests.exhaustive import examples, further

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
TABLE = schedules.one_f_one_b(2, 2, 4)
COSTS = graphpp.Costs.unit(2, 2)
LIMIT = 10.0  # seconds; 5 on an idle machine

# Each draw takes one value; values that one parameter accepts are wrong for all others.
WRONG: list[Any] = [
    *(None, "a", "", "1F1B", 3, -1, 0, 1, 2, 2.5, float("nan"), float("inf"), True, b"x", 10**9, 10**30),
    *([], [1], {}, {"a": 1}, (), object(), torch.ones(2), numpy.ones(2), len, X, TABLE, COSTS, Path("nowhere.csv"), "\0"),
    *(graphpp.Microbatch((X,), target=X), nn.Linear(8, 8), torch.float32, ["0F0 0B0"], graphpp.Memory(), int, range(3)),
]


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions that need no compiled model, by name."""
    named = {name: getattr(graphpp, name) for name in graphpp.__all__} | {
        f"schedules.{name}": getattr(schedules, name) for name in schedules.__all__
    }
    found = {name: value for name, value in named.items() if callable(value) and name not in ("compile", "verify")}
    makers = (graphpp.Schedule.of, graphpp.Schedule.parse, graphpp.Schedule.load, graphpp.Costs.unit)
    found |= {maker.__qualname__: maker for maker in makers}
    # Records of results are made by graphpp, and errors by anybody.
    records = ("Plan", "Pipeline", "PostValidation", "Profile", "Timeline", "Event", "Schedule", "StageCosts", "StepResult")
    results = ("EvalResult", "Comparison", "Difference", "FirstDifference", "Verification")
    errors = {name for name, value in found.items() if isinstance(value, type) and issubclass(value, Exception)}
    return {name: value for name, value in found.items() if name not in (*records, *results, *errors)}


FUNCTIONS = functions()


@contextlib.contextmanager
def refused_or_done() -> Iterator[None]:
    """A context that passes what ends well or in a `GraphPPError`, within `LIMIT` seconds."""
    began = time.monotonic()
    with contextlib.suppress(graphpp.GraphPPError):
        yield
    assert time.monotonic() - began < LIMIT


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A function with an argument for each parameter without a default, and for some with one."""
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    args, kwargs = [], {}
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        value = draw(st.sampled_from(WRONG))
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.append(value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif parameter.default is parameter.empty:
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        elif parameter.kind is not parameter.POSITIONAL_ONLY and draw(st.booleans()):
            kwargs[parameter.name] = value
    return name, tuple(args), kwargs


@settings(max_examples=examples(10_000), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(call=calls())
def test_functions_refuse_or_succeed(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = call
    with refused_or_done():
        FUNCTIONS[name](*args, **kwargs)


# ------------------------------------------------------------------------------------------------ a pipeline


def compiled(**options: Any) -> graphpp.Pipeline:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return graphpp.compile(model, F.mse_loss, **{"microbatches": 2, **options})


@pytest.fixture(scope="module")
def pipe() -> graphpp.Pipeline:
    made = compiled()
    made.step(X, target=X)
    return made


METHODS: dict[str, Callable[[graphpp.Pipeline, Any], Any]] = {
    "step": lambda pipe, value: pipe.step(value, target=X),
    "target": lambda pipe, value: pipe.step(X, target=value),
    "loss_weight": lambda pipe, value: pipe.step(X, target=X, loss_weight=value),
    "scaler": lambda pipe, value: pipe.step(X, target=X, scaler=value),
    "accumulation_steps": lambda pipe, value: pipe.step(X, target=X, accumulation_steps=value),
    "step_microbatches": lambda pipe, value: pipe.step_microbatches(value),
    "a microbatch": lambda pipe, value: pipe.step_microbatches([value]),
    "eval": lambda pipe, value: pipe.eval(value),
    "eval's loss_weight": lambda pipe, value: pipe.eval(X, target=X, loss_weight=value),
    "max_norm": lambda pipe, value: pipe.clip_grad_norm_(value),
    "norm_type": lambda pipe, value: pipe.clip_grad_norm_(1e9, value),
    "error_if_nonfinite": lambda pipe, value: pipe.clip_grad_norm_(1e9, error_if_nonfinite=value),
    "foreach": lambda pipe, value: pipe.clip_grad_norm_(1e9, foreach=value),
    "programs": lambda pipe, value: pipe.programs(value),
    "repeat": lambda pipe, value: pipe.profile(X, target=X, repeat=min(value, 2) if type(value) is int else value),
    "load_state_dict": lambda pipe, value: pipe.load_state_dict(value),
    "strict": lambda pipe, value: pipe.load_state_dict(pipe.state_dict(), strict=value),
    "an entry": lambda pipe, value: pipe.load_state_dict({**pipe.state_dict(), "0.weight": value}),
    "PostValidation": lambda pipe, value: graphpp.PostValidation(value, [], 1.0),
    "optimizer": lambda pipe, value: graphpp.PostValidation(pipe, value, 1.0),
    "PostValidation's scaler": lambda pipe, value: graphpp.PostValidation(
        pipe, torch.optim.SGD(pipe.parameters()), 1.0, scaler=value
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_refuse_or_succeed(pipe: graphpp.Pipeline, method: str) -> None:
    for value in WRONG:
        with refused_or_done():
            METHODS[method](pipe, value)


OPTIONS = ("split", "schedule", "microbatches", "mesh", "parallel", "backend", "memory", "gradients", "debug", "example")


@pytest.mark.parametrize("option", OPTIONS)
def test_compile_refuses_or_succeeds(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `debug` takes the name of a folder
    for value in WRONG:
        if callable(value) and option in ("schedule", "backend", "memory"):
            continue  # a function of the caller, whose own errors these would be
        with refused_or_done():
            compiled(**{option: value}).step(X, target=X)


@pytest.mark.parametrize("argument", ["model", *further("loss", "tolerance", "ranks", "microbatches", "against")])
def test_verify_refuses_or_succeeds(argument: str) -> None:
    for value in WRONG:
        good = {"model": nn.Linear(8, 8), "loss": F.mse_loss, "example": graphpp.Microbatch((X,), target=X)}
        with refused_or_done():
            graphpp.verify(**{**good, argument: value})


TENSORS: dict[str, Callable[[], Any]] = {
    "sparse": X.to_sparse,
    "compressed": X.to_sparse_csr,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged),
    "complex": lambda: X + 0j,
    "float8": lambda: X.to(torch.float8_e4m3fn),
    "no dimension": lambda: torch.tensor(1.0),
    "no rows": lambda: X[:0],
    "meta": lambda: X.to("meta"),
    "expanded": lambda: X[:1].expand(8, 8),
    "requires grad": lambda: X.clone().requires_grad_(),
}


@pytest.mark.filterwarnings("ignore:.*beta state|.*prototype stage")
@pytest.mark.parametrize("kind", TENSORS)
def test_unusual_tensors_are_refused_or_right(pipe: graphpp.Pipeline, kind: str) -> None:
    value = TENSORS[kind]()
    for method in ("step", "target", "eval"):
        with refused_or_done():
            METHODS[method](pipe, value)


# ------------------------------------------------------------------------------------------------ habits


HABITS: dict[str, tuple[Callable[[graphpp.Pipeline], Any], str]] = {
    "pipe(x)": (lambda pipe: pipe(X), "pipe.step"),
    "pipe.eval()": (lambda pipe: pipe.eval(), "model.eval()"),
    "pipe.train()": (lambda pipe: pipe.train(), "model.train()"),
    "pipe.to()": (lambda pipe: pipe.to("cpu"), "parallel=graphpp.Parallel"),
    "pipe.cuda()": (lambda pipe: pipe.cuda(), "parallel=graphpp.Parallel"),
    "pipe.module": (lambda pipe: pipe.module, "the model that was given"),
    "pipe.forward": (lambda pipe: pipe.forward(X), "pipe.step"),
    "pipe.modules()": (lambda pipe: pipe.modules(), "the model that was given"),
    "pipe.backward()": (lambda pipe: pipe.backward(), "pipe.step"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_modules_are_told_what_to_call(pipe: graphpp.Pipeline, habit: str) -> None:
    call, says = HABITS[habit]
    with pytest.raises(graphpp.GraphPPError) as error:
        call(pipe)
    assert says in str(error.value)


def test_an_unknown_attribute_is_unknown(pipe: graphpp.Pipeline) -> None:
    assert not hasattr(pipe, "nonsense")
    with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'nonsense'"):
        _ = pipe.nonsense


def test_zero_grad(pipe: graphpp.Pipeline) -> None:
    pipe.step(X, target=X)
    pipe.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in pipe.parameters())
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_schedule_s_name_is_simulated_and_checked() -> None:
    table = schedules.interleaved_1f1b(2, 4, 8)
    costs = graphpp.Costs.unit(4, 2)
    assert graphpp.simulate("Interleaved1F1B", costs, microbatches=8) == graphpp.simulate(table, costs)
    schedules.check("Interleaved1F1B", ranks=2, stages=4, microbatches=8)
    with pytest.raises(graphpp.ScheduleError, match="microbatches: the schedule '1F1B' is a table for any number"):
        graphpp.simulate("1F1B", costs)
    with pytest.raises(graphpp.ScheduleError, match="ranks: 3 stages do not tell"):
        graphpp.simulate("Interleaved1F1B", graphpp.Costs.unit(3, 3), microbatches=8)
