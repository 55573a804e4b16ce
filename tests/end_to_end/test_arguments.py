"""Arguments that mean nothing end in a `GraphPPError` at every public function, within seconds, and never in a bare error.

An exception of a function that the caller gave is the cause of an error that names the argument. Habits of modules are refused
with advice.

Random arguments are drawn for each parameter of each public function: values that may be right, and values that cannot be.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn import functional as F

import graphpp
from graphpp import schedules
from tests.distributed import run_ranks
from tests.exhaustive import cases, examples, further

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
TABLE = schedules.one_f_one_b(2, 2, 4)
COSTS = graphpp.Costs.unit(2, 2)
MICROBATCH = graphpp.Microbatch((X,), target=X)
LIMIT = 5.0  # seconds that this process computes, outside of the kernel: a busy machine adds none

# Each draw takes one value; values that one parameter accepts are wrong for all others.
WRONG: list[Any] = [
    *(None, "a", "", "1F1B", 3, -1, 0, 1, 2, 2.5, float("nan"), float("inf"), True, b"x", 10**9, 10**30),
    *([], [1], {}, {"a": 1}, (), object(), torch.ones(2), numpy.ones(2), len, X, TABLE, COSTS, Path("nowhere.csv"), "\0"),
    *(MICROBATCH, nn.Linear(8, 8), torch.float32, ["0F0 0B0"], graphpp.Memory(), int, range(3)),
]


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions that compile no model, by name."""
    named = {name: getattr(graphpp, name) for name in graphpp.__all__} | {
        f"schedules.{name}": getattr(schedules, name) for name in schedules.__all__
    }
    compiling = ("compile", "verify")  # these have tests of their own
    found = {name: value for name, value in named.items() if callable(value) and name not in compiling}
    plans = (graphpp.TrainingPlan, graphpp.TrainingPlans)
    makers = (graphpp.Schedule.of, graphpp.Schedule.parse, graphpp.Schedule.load, graphpp.Costs.unit)
    makers += tuple(kind.from_json for kind in plans)
    found |= {maker.__qualname__: maker for maker in makers}
    # Records of results are made by graphpp, and errors by anybody.
    records = ("Plan", "Pipeline", "Profile", "Timeline", "Event", "Schedule", "StageCosts", "StepResult")
    results = ("EvalResult", "Comparison", "Difference", "FirstDifference", "Verification", *(kind.__name__ for kind in plans))
    errors = {name for name, value in found.items() if isinstance(value, type) and issubclass(value, Exception)}
    return {name: value for name, value in found.items() if name not in (*records, *results, *errors)}


FUNCTIONS = functions()


@contextlib.contextmanager
def refused_or_done() -> Iterator[None]:
    """A context that passes what ends well or in a `GraphPPError`, within `LIMIT` seconds, whatever else the machine does."""
    began = os.times().user
    with contextlib.suppress(graphpp.GraphPPError):
        yield
    assert os.times().user - began < LIMIT


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


def compiled(**options: Any) -> graphpp.Pipeline:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
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
}


@pytest.mark.parametrize("method", cases(METHODS, "step"))
def test_methods_refuse_or_succeed(pipe: graphpp.Pipeline, method: str) -> None:
    for value in WRONG:
        with refused_or_done():
            METHODS[method](pipe, value)


OPTIONS = ("split", "schedule", "microbatches", "mesh", "parallel", "backend", "memory", "gradients", "debug", "example")


@pytest.mark.parametrize("option", OPTIONS)
def test_compile_refuses_or_succeeds(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `debug` takes the name of a folder
    for value in WRONG:
        if callable(value) and option == "backend":
            continue  # regions that the function fails to compile run eagerly, with a warning
        with refused_or_done():
            compiled(**{option: value}).step(X, target=X)


@pytest.mark.parametrize("argument", ["model", *further("loss", "tolerance", "ranks", "microbatches", "against")])
def test_verify_refuses_or_succeeds(argument: str) -> None:
    for value in WRONG:
        good = {"model": nn.Linear(8, 8), "loss": F.mse_loss, "example": graphpp.Microbatch((X,), target=X)}
        with refused_or_done():
            graphpp.verify(**{**good, argument: value})


class Starts:
    """A splitter that gives its function's result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.starts = function


# For each argument that takes a function: the options with the function, and a result that is none.
CALLBACKS: dict[str, tuple[Callable[[Callable[..., Any]], dict[str, Any]], Any]] = {
    "schedule": (lambda function: {"schedule": function}, "1F1B"),
    "split": (lambda function: {"split": Starts(function)}, [0, 1.5]),
    "memory.recompute": (lambda function: {"memory": function}, 3),
    "memory.offload": (lambda function: {"memory": graphpp.Memory(offload=function)}, None),
    "parallel.op_costs": (lambda function: {"parallel": graphpp.Parallel(op_costs=function), "memory": 0.5}, "a"),
}


def its_own_fault(*args: Any) -> Any:
    raise KeyError("my own fault")


@pytest.mark.parametrize("argument", CALLBACKS)
def test_an_exception_of_the_caller_s_function_is_the_cause_of_an_error_that_names_the_argument(argument: str) -> None:
    options, _ = CALLBACKS[argument]
    pipe = compiled(**options(its_own_fault))
    with pytest.raises(graphpp.GraphPPError, match=rf"^{argument}: the function its_own_fault raised KeyError") as found:
        pipe.step(X, target=X)
    assert isinstance(found.value.__cause__, KeyError)
    assert f"{__file__}:{its_own_fault.__code__.co_firstlineno + 1}" in str(found.value)


@pytest.mark.parametrize("argument", CALLBACKS)
def test_a_wrong_result_of_the_caller_s_function_is_shown_with_what_to_return(argument: str) -> None:
    options, wrong = CALLBACKS[argument]
    with pytest.raises(graphpp.GraphPPError) as found:
        compiled(**options(lambda *args: wrong)).step(X, target=X)
    text = str(found.value)
    assert text.startswith(f"{argument}: the function test_a_wrong_result")
    assert "must return " in text and text.endswith(f"returned {wrong!r}")


@pytest.mark.parametrize("argument", CALLBACKS)
def test_a_refusal_in_the_caller_s_function_comes_through(argument: str) -> None:
    def refuse(*args: Any) -> Any:
        raise graphpp.BatchError("take another batch")

    options, _ = CALLBACKS[argument]
    with pytest.raises(graphpp.BatchError, match="take another batch"):
        compiled(**options(refuse)).step(X, target=X)


def test_an_error_inside_the_loss_is_the_loss_s() -> None:
    words = r"the loss cannot be captured .*KeyError: 'my own fault'\n  at .*:\d+ in its_own_fault"
    with pytest.raises(graphpp.CaptureError, match=words) as found:
        graphpp.compile(nn.Linear(8, 8), its_own_fault).step(X, target=X)
    assert isinstance(found.value.__cause__, KeyError)


class Counting(nn.Module):
    """A loss that counts its calls in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return F.mse_loss(output, target)


LOSSES: dict[str, tuple[Any, str]] = {
    "a class": (nn.MSELoss, "loss must be a function .*, got the class MSELoss, not an object of it"),
    "no parameter": (lambda *, weight: X, r"loss must take \(output\) or \(output, target\), .*<lambda> does not: too many"),
    "three parameters": (lambda a, b, c: a.sum(), "<lambda> does not: missing a required argument: 'c'"),
    "a complex number": (lambda a, b: a.sum() + 0j, "the loss is of torch.complex64"),
    "a buffer of its own": (Counting(), "in place .* such as a plain attribute or a buffer of a loss module"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_cannot_be_one_is_refused(kind: str) -> None:
    loss, words = LOSSES[kind]
    with pytest.raises(graphpp.CaptureError, match=f"(?s){words}"):
        graphpp.compile(nn.Linear(8, 8), loss).step(X, target=X)


def test_a_class_in_place_of_its_object_is_told_so() -> None:
    for name, option in (("Inductor", "backend"), ("Memory", "memory"), ("Debug", "debug"), ("Parallel", "parallel")):
        with pytest.raises(graphpp.GraphPPError, match=rf"{option}: .*got the class graphpp\.{name}: give graphpp\.{name}\(\)"):
            compiled(**{option: getattr(graphpp, name)})
    with pytest.raises(graphpp.GraphPPError, match=r"give graphpp\.Schedule\(\.\.\.\)"):
        compiled(schedule=graphpp.Schedule)
    with pytest.raises(graphpp.GraphPPError, match="got the class Linear, not an object of it"):
        graphpp.compile(nn.Linear)  # type: ignore[arg-type]


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("value", [Unprintable(), 10**5000, list(range(10**6))], ids=["raises", "long", "many"])
def test_values_that_cannot_be_printed_are_refused_all_the_same(value: Any) -> None:
    for option in OPTIONS:
        with refused_or_done(), pytest.raises(graphpp.GraphPPError):
            compiled(**{option: value}).step(X, target=X)


# ------------------------------------------------------------------------------------------------ arguments that mean nothing

NONSENSE: dict[str, tuple[Callable[[graphpp.Pipeline], Any], str]] = {
    "the meta device": (lambda pipe: graphpp.Parallel(device="meta"), "parallel.device: nothing runs on the meta device"),
    "no such device": (lambda pipe: compiled(parallel="hpu"), "parallel.device: 'hpu' cannot be used on this machine"),
    "sparse values": (
        lambda pipe: pipe.load_state_dict({key: value.to_sparse() for key, value in pipe.state_dict().items()}),
        "4 entries that cannot be copied: 0.weight",
    ),
    "complex values": (
        lambda pipe: pipe.load_state_dict({**pipe.state_dict(), "0.bias": torch.zeros(8) + 0j}),
        "1 entries that cannot be copied: 0.bias",
    ),
    "no values": (
        lambda pipe: pipe.load_state_dict({**pipe.state_dict(), "0.bias": torch.zeros(8, device="meta")}),
        "1 entries that cannot be copied: 0.bias",
    ),
    "set_to_none": (lambda pipe: pipe.zero_grad("no"), "set_to_none: take True or False"),  # type: ignore[arg-type]
    "training": (lambda pipe: schedules.check(TABLE, ranks=2, stages=2, microbatches=4, training=3), "training: take True"),  # type: ignore[arg-type]
    "costs": (lambda pipe: schedules.check(TABLE, ranks=2, stages=2, microbatches=4, costs=3), "costs: take a graphpp.Costs"),  # type: ignore[arg-type]
    "seed": (lambda pipe: graphpp.schedule_auto(COSTS, ranks=2, microbatches=4, seed="a"), "seed: take an integer"),  # type: ignore[arg-type]
    "effort": (lambda pipe: graphpp.schedule_auto(COSTS, ranks=2, microbatches=4, effort=-1), "effort: take a number from 0"),
    "placement": (lambda pipe: graphpp.schedule_auto(COSTS, ranks=2, microbatches=4, placement={0: "a", 1: 0}), "placement"),  # type: ignore[dict-item]
    "name": (lambda pipe: graphpp.Schedule.of([["0F0"]], name=None), "name: take a string"),  # type: ignore[arg-type]
    "counts": (lambda pipe: graphpp.Schedule.of([["0F0"]], stages="a"), "stages: take an integer"),  # type: ignore[arg-type]
    "rows": (lambda pipe: graphpp.Schedule.of(torch.tensor(1)), r"rows: take a list of rows, got a tensor \[\]"),  # type: ignore[arg-type]
    "bytes": (lambda pipe: graphpp.StageCosts(kept_bytes=b"a"), "kept_bytes of StageCosts: times and bytes are finite numbers"),  # type: ignore[arg-type]
    "bytes by kind": (lambda pipe: graphpp.StageCosts(peak_bytes=3), "peak_bytes of StageCosts: .* by kind of action, got 3"),  # type: ignore[arg-type]
    "no time": (lambda pipe: graphpp.StageCosts(forward=None), "forward of StageCosts: .* 0 or more, got None"),  # type: ignore[arg-type]
    "steps of a run": (lambda pipe: pipe.report("report", seconds=range(10**12)), "seconds: take the numbers of at most"),
    "the name of a folder": (lambda pipe: pipe.report("a" * 256), "folder: take a path, got 'aaa"),
    "the name of a file": (lambda pipe: pipe.materialize(weights="a/" + "ä" * 128), "weights: take a path"),
    "root": (lambda pipe: graphpp.cache.entries(3), "root: take a path, or None, got 3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", NONSENSE)
def test_an_argument_that_means_nothing_is_named(pipe: graphpp.Pipeline, name: str) -> None:
    call, words = NONSENSE[name]
    with pytest.raises(graphpp.GraphPPError, match=words):
        call(pipe)


# ------------------------------------------------------------------------------------------------ large counts

LARGE: dict[str, Callable[[], Any]] = {
    "stages of costs": lambda: graphpp.Costs.unit(10**7, 1),
    "microbatches of a search": lambda: graphpp.schedule_auto(COSTS, ranks=2, microbatches=100_000),
    "effort of a search": lambda: graphpp.schedule_auto(COSTS, ranks=2, microbatches=4, effort=1e9),
    "microbatches of a pipeline": lambda: compiled(microbatches=10**9),
    "microbatches to verify": lambda: graphpp.verify(nn.Linear(8, 8), F.mse_loss, MICROBATCH, microbatches=10**6),
    "ranks to verify": lambda: graphpp.verify(nn.Linear(8, 8), F.mse_loss, MICROBATCH, ranks=10**6),
    "forwards of a table": lambda: schedules.one_f_one_b(1, 2**12, 2**12),
    "ranks of a table": lambda: schedules.zb1p(2**20, 2**20, 1),
}


@pytest.mark.parametrize("counts", LARGE)
def test_counts_that_nobody_runs_are_refused_at_once(counts: str) -> None:
    began = os.times().user
    with pytest.raises(graphpp.GraphPPError):
        LARGE[counts]()
    assert os.times().user - began < 1


# ------------------------------------------------------------------------------------------------ unusual tensors

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


class Parts(nn.Module):
    """A layer of the real and the imaginary part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.view_as_real(x.resolve_conj()).sum(-1)) if x.is_complex() else self.layer(x)


@pytest.mark.parametrize("lazy", [torch.complex(X, X.T).conj(), torch.complex(X, X.T).conj().imag], ids=["conj", "neg"])
def test_a_tensor_with_delayed_signs_is_its_values(lazy: torch.Tensor) -> None:
    assert lazy.is_conj() or lazy.is_neg()
    found = graphpp.compile(Parts(), F.mse_loss, microbatches=2).step(lazy, target=X).losses
    assert torch.equal(found, torch.stack([F.mse_loss(Parts()(a), b) for a, b in zip(lazy.chunk(2), X.chunk(2), strict=True)]))


HABITS: dict[str, tuple[Callable[[graphpp.Pipeline], Any], str]] = {
    "pipe(x)": (lambda pipe: pipe(X), "pipe.step"),
    "pipe.eval()": (lambda pipe: pipe.eval(), "model.eval()"),
    "pipe.to()": (lambda pipe: pipe.to("cpu"), "parallel=graphpp.Parallel"),
    "pipe.module": (lambda pipe: pipe.module, "the model that was given"),
    "pipe.backward()": (lambda pipe: pipe.backward(), "pipe.step"),
    "pipe.training": (lambda pipe: pipe.training, "model.train()"),
    "pipe.compile()": (lambda pipe: pipe.compile(), 'backend="inductor"'),
    "pipe.to_empty()": (lambda pipe: pipe.to_empty(device="cpu"), "pipe.materialize(init)"),
    "an attribute of the model": (lambda pipe: pipe.append(nn.Tanh()), "the model that was given"),
    "pipe.generate(x)": (lambda pipe: pipe.generate(X), "pipe.save_weights(folder), and generate with a model"),
    "pipe.save_pretrained()": (lambda pipe: pipe.save_pretrained("to"), "pipe.save_weights(folder)"),
    "iter(pipe)": (iter, "pipe.parameters()"),
    "SGD(pipe)": (torch.optim.SGD, "pipe.parameters()"),
    "copy.deepcopy(pipe)": (copy.deepcopy, "pipe.state_dict()"),
    "pickle.dumps(pipe)": (pickle.dumps, "pipe.state_dict()"),
    "AveragedModel(pipe)": (torch.optim.swa_utils.AveragedModel, "pipe.state_dict()"),
    "torch.compile(pipe)": (lambda pipe: torch.compile(pipe, backend="eager")(X), "pipe.step"),
    "get_model_state_dict(pipe)": (get_model_state_dict, "the model that was given"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_modules_are_told_what_to_call(pipe: graphpp.Pipeline, habit: str) -> None:
    call, says = HABITS[habit]
    with pytest.raises(graphpp.GraphPPError) as error:
        call(pipe)
    assert says in str(error.value)


def replicated(rank: int) -> str:
    torch.set_num_threads(1)
    pipe = compiled()
    pipe.step(X, target=X)
    try:
        nn.parallel.DistributedDataParallel(pipe)  # type: ignore[arg-type]
    except graphpp.GraphPPError as error:
        return str(error)
    return "accepted"


def test_data_parallel_wrappers_are_refused() -> None:
    assert all("a pipeline is no module" in found for found in run_ranks(replicated, 2))


def test_zero_grad(pipe: graphpp.Pipeline) -> None:
    pipe.step(X, target=X)
    pipe.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in pipe.parameters())
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_zero_grad_before_the_first_step() -> None:
    """As many loops begin."""
    model = nn.Linear(8, 8)
    made = graphpp.compile(model, F.mse_loss, microbatches=2)
    model(X).sum().backward()
    made.zero_grad()
    made.step(X, target=X)
    found = model.weight.grad.clone()
    made.zero_grad()
    made.step(X, target=X)
    assert torch.equal(found, model.weight.grad)


def test_a_schedule_s_name_is_simulated_and_checked() -> None:
    table = schedules.interleaved_1f1b(2, 4, 8)
    costs = graphpp.Costs.unit(4, 2)
    assert graphpp.simulate("Interleaved1F1B", costs, microbatches=8) == graphpp.simulate(table, costs)
    schedules.check("Interleaved1F1B", ranks=2, stages=4, microbatches=8)
    with pytest.raises(graphpp.ScheduleError, match="microbatches: the schedule '1F1B' is a table for any number"):
        graphpp.simulate("1F1B", costs)
    with pytest.raises(graphpp.ScheduleError, match="ranks: 3 stages do not tell"):
        graphpp.simulate("Interleaved1F1B", graphpp.Costs.unit(3, 3), microbatches=8)
