"""Bad input is refused before anything runs: the error's type, what its text names, and that nothing has changed."""

import csv
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import BatchError, CaptureError, GraphPPError, Microbatch, Schedule, ScheduleError, SplitError
from graphpp.batch.cut_batch import BatchCutter
from graphpp.batch.microbatch import FlatMicrobatch
from tests.distributed import run_ranks
from tests.special_models import CLASSES, WIDTH, Plain
from tests.training import CASES, compiled, step

X = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % CLASSES


def snapshot(model: nn.Module) -> list[Any]:
    """All that a refused call must leave as it was."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    state = [(fqn, id(t), t.data_ptr(), t.device, t.requires_grad, t.grad, t.tolist()) for fqn, t in tensors]
    return [state, [module.training for module in model.modules()], torch.is_grad_enabled()]


class Fault(NamedTuple):
    """What is given, what is raised, and the words that its text must have."""

    give: Callable[[nn.Module], Any]
    error: type[GraphPPError]
    words: str


def run(loss: Any = F.cross_entropy, args: tuple[Any, ...] = (X,), target: Any = Y, **options: Any) -> Any:
    """Compile and step with one thing wrong."""
    kwargs = options.pop("kwargs", {})
    options.setdefault("microbatches", 4)
    return lambda model: graphpp.compile(model, loss, **options).step(*args, target=target, **kwargs)


def make(**options: Any) -> Any:
    """Only compile."""
    return lambda model: graphpp.compile(model, options.pop("loss", F.cross_entropy), **options)


def given(*parts: Any) -> Any:
    return lambda model: graphpp.compile(model, F.cross_entropy).step_microbatches(list(parts))


def refused(model: nn.Module, fault: Fault) -> str:
    before = snapshot(model)
    with pytest.raises(fault.error, match=fault.words) as caught:
        fault.give(model)
    assert snapshot(model) == before
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ what compile is given

TWO_STAGES = [["0F0", "1F0", "1B0", "0B0"]]

SETTINGS = {
    "no module": Fault(lambda model: graphpp.compile(X, None), CaptureError, "model must be an nn.Module, got Tensor"),
    "loss of another type": Fault(make(loss="mse"), CaptureError, "loss must be a function .* got str"),
    "loss with parameters": Fault(make(loss=nn.Linear(2, 1)), CaptureError, "trainable parameters of its own .weight"),
    "example of another type": Fault(make(example=(X, Y)), BatchError, "must be a graphpp.Microbatch.* got tuple"),
    "reduction": Fault(make(gradients="avg"), GraphPPError, "'mean' or 'sum' or 'rows', got 'avg'"),
    "no microbatches": Fault(make(microbatches=0), BatchError, "positive integer .* got 0"),
    "costs that are a number": Fault(
        lambda model: graphpp.Parallel(op_costs=3), GraphPPError, "parallel.op_costs: take a function"
    ),
    "no such device": Fault(
        make(parallel="cpus"), GraphPPError, "parallel.device: take a torch.device or its name, got 'cpus'"
    ),
    "unknown schedule": Fault(make(schedule="1F2B"), ScheduleError, "'1F2B'; did you mean 1F1B"),
    "schedule of another type": Fault(make(schedule=7), ScheduleError, "7 is no schedule"),
    "rows of other ranks": Fault(make(schedule={1: ["0F0"]}), ScheduleError, r"for each rank from 0 on, not \[1\]"),
    "no such file": Fault(make(schedule="none.csv"), ScheduleError, "none.csv cannot be read"),
    "two numbers of microbatches": Fault(
        make(schedule=TWO_STAGES, microbatches=3), ScheduleError, "microbatches=3, but the schedule 'custom' is for 1"
    ),
}

SPLITS = {
    "unknown FQN": Fault(run(split=["layer.2"]), SplitError, "no module 'layer.2'; nearest: 'layers.2'"),
    "out of order": Fault(run(split=["layers.3", "layers.1"]), SplitError, "execution order.*'layers.3'.*'layers.1'"),
    "listed twice": Fault(run(split=["layers.1", "layers.1"]), SplitError, "'layers.1' is listed twice"),
    "more stages than layers": Fault(run(split=9), SplitError, "9 stages .*: the model has 4 repeated layers"),
    "an empty last stage": Fault(run(split=[["layers.0"], []]), SplitError, "stage 1, the last, cannot be empty"),
    "a string": Fault(run(split="layers.1"), SplitError, "is a string"),
    "of another type": Fault(run(split=2.5), SplitError, "not float"),
    "mixed forms": Fault(run(split=["layers.1", ["layers.2"]]), SplitError, "mixes forms"),
    "schedule for another number": Fault(
        run(split=["layers.1", "layers.2"], schedule=TWO_STAGES, microbatches=1),
        ScheduleError,
        "2 stages|stage 2 stands on no rank",
    ),
    "schedule of other microbatches": Fault(
        run(schedule=lambda *counts: TWO_STAGES, split=2, microbatches=2),
        ScheduleError,
        "table for 2 stages and 1 microbatches",
    ),
    "a function that returns nothing": Fault(
        run(schedule=lambda *counts: None), ScheduleError, "must return a Schedule, or the rows of a table, but returned None"
    ),
}

# ------------------------------------------------------------------------------------------------ what step is given


class Hidden:
    """Not a pytree."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


BATCHES = {
    "fewer rows than the table's microbatches": Fault(
        run(schedule=graphpp.schedules.one_f_one_b(1, 1, 25), microbatches=25, split=None), BatchError, "a batch of 24 cannot"
    ),
    "no steps": Fault(run(kwargs={"accumulation_steps": 0}), BatchError, "accumulation_steps: take a positive integer"),
    "weights of another count": Fault(
        run(kwargs={"loss_weight": [1.0, 2.0, 3.0]}), BatchError, r"loss_weight has shape \[3\], .* 4 microbatches"
    ),
    "a weight that is nan": Fault(
        run(kwargs={"loss_weight": [1.0, float("nan"), 1.0, 1.0]}), BatchError, "loss_weight of microbatch 1"
    ),
    "no scaler": Fault(run(kwargs={"scaler": 2.0}), GraphPPError, "scaler: take a torch.amp.GradScaler, or None, got 2.0"),
    "no rows": Fault(run(args=(X[:0],), target=Y[:0]), BatchError, "the batch is empty"),
    "no target": Fault(run(target=None), BatchError, "the loss needs a target: step.*target="),
    "target without loss": Fault(run(loss=None), BatchError, "nothing reads the target"),
    "target of other rows": Fault(run(target=Y[:4]), BatchError, "target has first dimension 4, the batch has 24"),
    "no tensors": Fault(run(args=(3,), target=4), BatchError, "no tensor with a batch dimension: .*step_microbatches"),
    "numpy": Fault(run(args=(X.numpy(),)), BatchError, r"args\[0\] is a ndarray.*torch.as_tensor"),
    "hidden tensors": Fault(run(kwargs={"x": Hidden(X)}), BatchError, r"kwargs\['x'\] is a Hidden.*register"),
    "requires grad": Fault(run(args=(X.clone().requires_grad_(),)), BatchError, r"args\[0\] requires grad.*detach"),
    "no microbatches": Fault(given(), BatchError, "at least one microbatch"),
    "tuples for microbatches": Fault(given((X, Y)), BatchError, "is a graphpp.Microbatch.* got tuple"),
    "a later microbatch without target": Fault(given(Microbatch((X,), {}, Y), Microbatch((X,))), BatchError, "needs a target"),
    "microbatch without target": Fault(given(Microbatch((X,))), BatchError, "the loss needs a target"),
    "another dtype": Fault(
        run(args=(X.double(),)), CaptureError, r"module 'layers.0' at .*:\d+ multiplies values of float32 and float64"
    ),
    "wrong width": Fault(run(args=(X[:, :3],)), CaptureError, "cannot be captured"),
    "an argument too many": Fault(run(args=(X, X)), CaptureError, "positional argument"),
}

# ------------------------------------------------------------------------------------------------ the loss

LOSSES = {
    "a vector": Fault(run(loss=lambda y, t: y.sum(0)), CaptureError, r"must be a scalar tensor, got shape \(10,\)"),
    "nothing": Fault(run(loss=lambda y, t: None), CaptureError, "must be a scalar tensor, got NoneType"),
    "detached": Fault(run(loss=lambda y, t: y.detach().sum()), CaptureError, "does not depend on any parameter"),
    "of the target only": Fault(run(loss=lambda y, t: t.float().mean()), CaptureError, "does not depend on any"),
    "no own loss": Fault(run(loss=None, target=None), CaptureError, "without one. Pass loss="),
}

KINDS = {"settings": SETTINGS, "split": SPLITS, "batch": BATCHES, "loss": LOSSES}
NAMED = [[(f"{kind}: {name}", fault) for name, fault in faults.items()] for kind, faults in KINDS.items()]
ALL = dict(filter(None, chain(*zip_longest(*NAMED))))  # one of each kind in turn


@pytest.mark.first_cases(9)
@pytest.mark.parametrize("name", ALL)
def test_refused_and_nothing_changed(name: str) -> None:
    model = CASES["plain"]().model
    model.layers[1].eval()
    model.layers[2].requires_grad_(False)
    refused(model, ALL[name])


def test_the_pipeline_goes_on_after_a_refused_step() -> None:
    case, twin = CASES["plain"](), CASES["plain"]()
    pipe = compiled(case, split=["layers.2"], schedule="1F1B", microbatches=4)
    step(pipe, case.batch)
    before = {fqn: p.grad.clone() for fqn, p in pipe.named_parameters()}
    for wrong in ({"target": None}, {"target": Y[:4]}, {"target": Y, "mask": X}):
        with pytest.raises(GraphPPError):
            pipe.step(X, **wrong)
    assert all(torch.equal(p.grad, before[fqn]) for fqn, p in pipe.named_parameters())
    step(pipe, case.batch)
    for part in 2 * twin.batch.microbatches(4):
        (F.cross_entropy(twin.model(*part.args), part.target) / 4).backward()
    assert all(torch.equal(p.grad, twin.model.get_parameter(fqn).grad) for fqn, p in pipe.named_parameters())


class Rerun(torch.autograd.Function):
    """Checkpointing by hand: its backward adds to the gradients of parameters that it was not given."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            again = ctx.layer(x)
        torch.autograd.backward(again, grad)
        return None, x.grad


class Rerunning(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(Rerun.apply(self.layers[1], self.layers[0](x)))  # the line to name


class Branching(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line to name
            x = -x
        return super().forward(x)


class Writing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class LearnedBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Opaque(Plain):
    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


MODELS = {
    "a function that adds to gradients by itself": (
        Rerunning(),
        F.cross_entropy,
        rf"Rerun at {__file__}:\d+.*to name.* layers.1.weight",
    ),
    "data decides": (Branching(), F.cross_entropy, rf"{__file__}:\d+ in forward: if x.sum\(\) > 0.*\n.*torch.where"),
    "writes into its input": (Writing(), F.cross_entropy, r"in place into an input of the model.* Write into a clone\(\)"),
    "a buffer that requires grad": (LearnedBuffer(), F.cross_entropy, "the buffer scale requires grad, .* an nn.Parameter"),
    "no parameters": (nn.Tanh(), lambda y, t: y.sum(), "does not depend on any parameter"),
    "all frozen": (Plain().requires_grad_(False), F.cross_entropy, "does not depend on any parameter"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_captured(name: str) -> None:
    model, loss, words = MODELS[name]
    refused(model, Fault(run(loss=loss, args=(X.clone(),)), CaptureError, words))


def test_an_output_that_hides_its_tensors() -> None:
    def loss(output: Hidden, target: Tensor) -> Tensor:
        return F.cross_entropy(output.value, target)

    pipe = graphpp.compile(Opaque(), loss, microbatches=4)
    pipe.step(X, target=Y)  # the loss can read it
    with pytest.raises(CaptureError, match=r"output holds a Hidden.*register_dataclass"):
        pipe.eval(X)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Callable[[list[list[str]]], Path]]:
    def write(rows: list[list[str]]) -> Path:
        path = tmp_path / "table.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        return path

    yield write


GOOD = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]

CSV_FAULTS = {
    "no action": ([["0F0", "1Q0"]], r"line 1, cell 2: action '1Q0', column 2"),
    "trailing junk": ([["0F0", "1F0junk"]], r"line 1, cell 2.*column 4"),
    "a later line": ([["0F0"], ["1F"]], r"line 2, cell 1.*microbatch number"),
    "doubled": ([["0F0", "0F0", "1F0", "1B0", "0B0"]], "rank 0, column 1: 0F0 stands in column 0 already"),
    "missing": ([["0F0", "1F0", "1B0"]], "0B0 .*is missing from this rank"),
    "backward first": ([["0F0", "1B0", "1F0", "0B0"]], "1B0 needs 1F0.*move 1F0 before 1B0"),
    "a rank too many": ([["0F0", "0B0"], ["1F0", "1B0"]], "rows for 2 ranks, but 1 run it"),
}


@pytest.mark.parametrize("name", CSV_FAULTS)
def test_faults_of_a_schedule_file(name: str, table: Callable[[list[list[str]]], Path]) -> None:
    rows, words = CSV_FAULTS[name]
    refused(CASES["plain"]().model, Fault(run(split=2, schedule=table(rows), microbatches=None), ScheduleError, words))


def test_every_form_of_a_schedule(table: Callable[[list[list[str]]], Path]) -> None:
    forms = [GOOD, {0: GOOD[0]}, Schedule.of(GOOD), table(GOOD), str(table(GOOD)), lambda *counts: GOOD]
    losses = []
    for form in forms:
        pipe = graphpp.compile(CASES["plain"]().model, F.cross_entropy, split=2, schedule=form, microbatches=2)
        losses.append(pipe.step(X, target=Y).losses)
    assert all(torch.equal(each, losses[0]) for each in losses)


def test_a_table_brings_its_number_of_microbatches() -> None:
    pipe = graphpp.compile(CASES["plain"]().model, F.cross_entropy, schedule=GOOD)
    assert pipe.step(X, target=Y).losses.shape == (2,)
    parts = [Microbatch((X[:8],), {}, Y[:8])] * 3
    with pytest.raises(ScheduleError, match="'custom' is for 2 microbatches, this step has 3"):
        pipe.step_microbatches(parts)


def stages_that_do_not_fit(rank: int) -> list[str]:
    found = []
    for options in ({"split": 4, "schedule": "1F1B"}, {"split": 3, "schedule": "LoopedBFS"}):
        model = CASES["plain"]().model
        found.append(refused(model, Fault(run(**options), ScheduleError, "stages")))
    return found


def test_stages_that_do_not_fit_the_ranks() -> None:
    for one, several in run_ranks(stages_that_do_not_fit, 2):
        assert "1F1B runs one stage per rank: 4 stages do not fit 2 ranks" in one
        assert "3 stages do not fit 2 ranks" not in one and "LoopedBFS" in several


def chosen_microbatches(rank: int, rows: int) -> int:
    pipe = graphpp.compile(CASES["plain"]().model, F.cross_entropy, schedule="Interleaved1F1B")
    return len(pipe.step(X[:rows], target=Y[:rows]).losses)


def test_a_number_of_microbatches_is_chosen_that_batch_and_schedule_admit() -> None:
    assert run_ranks(chosen_microbatches, 2, 24) == [8, 8]
    assert run_ranks(chosen_microbatches, 2, 10) == [2, 2]  # Interleaved1F1B does not admit 5


def subgroups(rank: int) -> tuple[Tensor, list[str]]:
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    case = CASES["tied"]()
    with pytest.raises(GraphPPError, match=f"rank {rank} is not in the group"):
        compiled(case, mesh=other)
    pipe = compiled(case, mesh=mine, split=["layers.2"], schedule="1F1B", microbatches=4)
    losses = step(pipe, case.batch).losses
    pipe.clip_grad_norm_(0.1)
    return losses, [fqn for fqn, _ in pipe.named_parameters()]


def test_two_pipelines_on_two_groups_of_ranks() -> None:
    found = run_ranks(subgroups, 4)
    case = CASES["tied"]()
    losses = step(compiled(case, microbatches=4), case.batch).losses
    assert all(torch.equal(each, losses) for each, _ in found)
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]


def cut_shapes(example: Microbatch | None = None, microbatches: int = 4, **kwargs: Any) -> list[list[int]]:
    cutter = BatchCutter(example)
    parts = cutter.cut(FlatMicrobatch.of(Microbatch((), kwargs, Y)), microbatches)
    assert len(parts) == microbatches
    return [list(tensor.shape) for tensor in parts[0].tensors.values()]


def test_the_batch_dimension_is_the_one_that_most_tensors_have() -> None:
    assert cut_shapes(mask=torch.ones(8, 8), x=X) == [[8, 8], [6, 8], [6]]
    assert cut_shapes(mask=graphpp.whole(torch.ones(24, 24)), x=X) == [[24, 24], [6, 8], [6]]
    assert cut_shapes(scale=torch.tensor(2.0), x=X) == [[], [6, 8], [6]]


def test_an_example_tells_what_has_no_batch_dimension() -> None:
    one = Microbatch((), {"mask": torch.ones(24, 24), "x": X[:6]}, Y[:6])
    assert cut_shapes(one, mask=torch.ones(24, 24), x=X) == [[24, 24], [6, 8], [6]]
    with pytest.raises(BatchError, match="Give a whole batch to step"):
        BatchCutter(one).cut(FlatMicrobatch.of(one), 4)
