"""`graphpp.verify`: right pipelines are found right and left alone; a fault is named by module, source line and stage."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphpp
from graphpp.passes import lower as recipe
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.gradients.accumulate import Accumulator
from graphpp.runtime.stage import GraphStage
from graphpp.runtime.task import Receive, Task, TaskKey
from tests.exhaustive import further
from tests.models import MODELS, Case, cuts
from tests.special_models import CUTS, SPECIAL

HERE = __file__


def line_of(text: str) -> int:
    """The number of this file's first line that holds `text`."""
    with open(HERE) as source:
        return next(number for number, line in enumerate(source, 1) if text in line)


def example(case: Case, rows: int = 4) -> graphpp.Microbatch:
    """A few rows of a case's batch."""
    return graphpp.Microbatch(*case.batch.microbatches(24 // rows)[0])


def verified(case: Case, stages: int = 2, schedule: str = "1F1B", **options: Any) -> graphpp.Verification:
    return graphpp.verify(case.model, case.loss, example(case), split=CUTS[stages], schedule=schedule, **options)


@pytest.mark.parametrize(
    ("stages", "schedule", "ranks"),
    [(1, "auto", 1), (2, "GPipe", None), (4, "1F1B", None), (4, "Interleaved1F1B", None), (4, "LoopedBFS", 2)],
)
@pytest.mark.parametrize("name", ["norms", *further("tied", "partial")])
def test_right_models_are_ok(name: str, stages: int, schedule: str, ranks: int | None) -> None:
    found = verified(SPECIAL[name](), stages, schedule, ranks=ranks, microbatches=3)
    assert found.ok and found.eager.compared, str(found)
    assert found.eager.verdict == "equal"
    assert found.cut.verdict == ("close" if name == "tied" and stages > 1 else "equal")
    assert found.plan.schedule.ranks == (ranks or (stages if schedule in ("GPipe", "1F1B") else 2))
    assert len(found.cut.losses) == 3


@pytest.mark.parametrize("name", ["hf_gpt2", *further("hf_llama_labels", "hf_vit")])
def test_hugging_face_models_are_ok(name: str) -> None:
    case = MODELS[name]()
    found = graphpp.verify(case.model, case.loss, example(case, 2), split=cuts(name, 2))
    found.raise_if_wrong()
    assert found.cut.verdict == "equal"


class Noisy(nn.Module):
    """Dropout in every layer, and noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + 0.1 * torch.randn_like(x)
        return x


def noisy() -> Case:
    case = SPECIAL["plain"]()
    return Case(Noisy(), F.cross_entropy, case.batch)


def test_random_numbers_are_the_same_in_eager() -> None:
    found = verified(noisy(), 4)
    assert (found.cut.verdict, found.eager.verdict, found.eager.compared) == ("equal", "equal", True), str(found)


def is_traced(x: Tensor) -> bool:
    """What a model may find out by itself, though it is told that it is not traced."""
    return type(x) is not Tensor


class Noisier(Noisy):
    """Draws more random numbers in eager than under a trace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if is_traced(x) else F.dropout(x, 0.1))


def test_other_random_operators_are_said_not_to_be_compared() -> None:
    found = verified(Case(Noisier(), F.cross_entropy, SPECIAL["plain"]().batch))
    assert found.ok and not found.eager.compared and "NOT COMPARED" in str(found)


def test_nothing_of_the_model_changes() -> None:
    case = SPECIAL["norms"]()
    case.model.layers[0].eval()
    for parameter in case.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    objects = [*case.model.parameters(), *case.model.buffers()]
    kept = [value.detach().clone() for value in objects]
    grads = [(parameter, parameter.grad, parameter.grad.clone()) for parameter in case.model.parameters()]
    flags = [module.training for module in case.model.modules()]
    states = torch.get_rng_state(), random.getstate()
    assert verified(case).ok
    assert all(a is b for a, b in zip(objects, [*case.model.parameters(), *case.model.buffers()], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(objects, kept, strict=True))
    assert all(parameter.grad is grad and torch.equal(grad, value) for parameter, grad, value in grads)
    assert flags == [module.training for module in case.model.modules()]
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()


def test_a_model_without_memory_is_refused() -> None:
    case = SPECIAL["plain"]()
    with pytest.raises(graphpp.GraphPPError, match="meta device"):
        graphpp.verify(case.model.to("meta"), case.loss, example(case), split=2)
    with pytest.raises(graphpp.BatchError, match="example="):
        graphpp.verify(case.model, case.loss)


def breaking(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[JointGraph], None]) -> None:
    """Let `change` spoil the joint graph right before a pass of the recipe."""
    original = getattr(recipe, name)

    def broken(joint: JointGraph, *rest: Any) -> Any:
        change(joint)
        return original(joint, *rest)

    monkeypatch.setattr(recipe, name, broken)


def scaled(node: fx.Node) -> None:
    """Let a node's readers read 1.5 times its value: what a wrong rewrite does."""
    with node.graph.inserting_after(node):
        wrong = node.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.5))
    wrong.meta = {**node.meta}
    node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.extra = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = torch.tanh(y)  # the line that a pass spoils
        if is_traced(x):
            y = y * (1 + self.extra)  # the line that only a trace runs
        return x + y


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def layers() -> Case:
    case = SPECIAL["plain"]()
    return Case(Layers(), F.cross_entropy, case.batch)


def the_tanh_of(joint: JointGraph, call: str) -> fx.Node:
    return next(n for n in joint.computed() if n.target is torch.ops.aten.tanh.default and call in n.meta["calls"])


def test_a_value_changed_by_a_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(monkeypatch, "cut_stages", lambda joint: scaled(the_tanh_of(joint, "layers.2")))
    found = verified(layers(), 4)
    first = found.cut.first
    assert not found.ok and found.eager.ok and first is not None
    assert (first.fqn, first.stage, first.microbatch) == ("layers.2", 2, 0)
    line = line_of("self.extra)  # the line that only a trace")  # the first that reads the spoilt value
    assert first.source == f"{HERE}:{line}"
    assert f"layers.2 ({HERE}:{line}), stage 2" in str(found) and "WRONG" in str(found)
    with pytest.raises(graphpp.GraphPPError, match="THEY DIFFER"):
        found.raise_if_wrong()


def test_a_gradient_that_is_added_up_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Accumulator.add

    def twice(self: Accumulator, microbatch: int, fqn: str, gradient: Tensor) -> None:
        factor = 2 if fqn == "layers.3.linear.bias" else 1
        add(self, microbatch, fqn, gradient * factor)

    monkeypatch.setattr(Accumulator, "add", twice)
    found = verified(layers(), 4)
    first = found.cut.first
    assert [fqn for fqn, each in found.cut.largest.items() if each.verdict != "equal"] == ["layers.3.linear.bias"]
    assert found.cut.largest["layers.3.linear.bias"].relative == pytest.approx(1)
    assert first is not None and first.what == "the gradient of layers.3.linear.bias"
    assert (first.fqn, first.stage) == ("layers.3.linear", 3)


def test_an_activation_of_another_microbatch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive_of, kept = GraphStage._receive, dict[str, Sequence[Tensor]]()

    def stale(self: GraphStage, key: TaskKey, neighbour: GraphStage | None) -> Receive | None:
        receive = receive_of(self, key, neighbour)
        if receive is None or self.stage_index != 2 or key.direction != "F":
            return receive
        return lambda: kept.setdefault("first", receive())

    monkeypatch.setattr(GraphStage, "_receive", stale)
    first = verified(layers(), 4, microbatches=3).cut.first
    assert first is not None and (first.fqn, first.stage) == ("layers.1", 2)
    assert "received by the forward of stage 2" in first.what
    assert first.source == f"{HERE}:{line_of('return x + y')}"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_lost_buffer_update_is_found(monkeypatch: pytest.MonkeyPatch, microbatches: int) -> None:
    file = Task._file_forward

    def lost(self: Task, results: Any) -> None:
        wiring = self._wiring
        kept = wiring.updates
        wiring.updates = [] if self.program.stage == 1 else kept
        file(self, results)
        wiring.updates = kept

    monkeypatch.setattr(Task, "_file_forward", lost)
    found = verified(SPECIAL["norms"](), 4, microbatches=microbatches)
    first = found.cut.first
    wrong = {fqn for fqn, each in found.cut.buffers.items() if each.verdict == "differs"}
    assert wrong == {f"layers.1.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert first is not None and first.fqn.startswith("layers.1.1") and first.stage == 1


@pytest.mark.parametrize("extra", [0.01, 1e-7])
def test_where_a_trace_runs_other_code_than_eager(extra: float) -> None:
    case = layers()
    case.model.layers[2].extra = extra
    found = verified(case)
    first = found.eager.first
    assert found.cut.verdict == "equal" and first is not None
    assert found.eager.verdict == ("differs" if extra > 1e-3 else "close") and found.ok == (extra < 1e-3)
    assert (first.fqn, first.what, first.microbatch) == ("layers.2", "what layers.2 returns", 0)
    assert first.source == f"{HERE}:{line_of('return x + y')}"
    assert f"layers.2 ({HERE}" in str(found)


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        ("input", r"input .*, in outside of all modules.*microbatch 0"),
        ("parameter", "parameter 1.weight, in 1.weight, microbatch 0"),
        ("loss of microbatch 1", r"log, in outside of all modules \(.*test_verify.py:\d+\), microbatch 1"),
        ("gradient", r"\w+, in outside of all modules \(.*test_verify.py:\d+\), microbatch 0"),
        ("nothing", ""),
    ],
)
def test_losses_and_gradients_that_are_not_finite_show_nothing(wrong: str, first: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan, 0.0]))
    with torch.no_grad():
        (x if wrong == "input" else model[1].weight)[1, 1] += torch.nan if wrong in ("input", "parameter") else 0.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = output.square().mean() * target.mean()
        if wrong == "gradient":
            return value + (0.0 * output).sum().sqrt()
        return value.log() if wrong == "loss of microbatch 1" else value

    parts = [graphpp.Microbatch((x,), target=torch.tensor([sign])) for sign in (1.0, -1.0)]
    found = graphpp.verify(model, loss, parts, split=["1"])
    assert found.ok == (wrong == "nothing"), str(found)
    if first:
        assert found.cut.verdict == found.eager.verdict == "not finite"
        assert re.search(f"first part at {first}, not finite", str(found)), str(found)
        with pytest.raises(graphpp.GraphPPError, match="NOTHING IS SHOWN"):
            found.raise_if_wrong()


class BeforeNorm(nn.Module):
    """The gradient of a bias before a batch norm is rounding alone, which other code rounds otherwise."""

    def __init__(self, traced: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.traced = traced

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.last((x * self.traced if is_traced(x) else x / 3).tanh() + x.sigmoid())


@pytest.mark.parametrize(
    ("traced", "right", "dtype"),
    [(1 / 3, True, torch.float32), (1 / 3, True, torch.float64), (1 / 3 + 1e-3, False, torch.float32)],
)
def test_gradients_that_are_rounding_alone_may_part_from_eager(traced: float, right: bool, dtype: torch.dtype) -> None:
    model, x = BeforeNorm(traced).to(dtype), torch.randn(64, 8, dtype=dtype)
    target = torch.randn(64, 8, dtype=dtype)
    given = graphpp.Microbatch((x,), target=target)
    report = graphpp.verify(model, F.mse_loss, given, split=["last"], microbatches=2)
    assert report.ok == right and report.cut.verdict == "equal", report
    if right:
        assert "rounding alone moves the gradient of first.bias" in report.eager.note
        assert report.eager.largest["first.bias"].relative > report.tolerance
        assert not graphpp.verify(model, F.mse_loss, given, split=["last"], microbatches=2, tolerance=report.tolerance).ok


class Spectral(nn.Module):
    """A filter of complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.ifft(torch.fft.fft(x) * self.filter).imag)


@pytest.mark.parametrize("tolerance", [None, 1e-4])
def test_complex_gradients_are_compared_whole(tolerance: float | None) -> None:
    x = torch.randn(4, 8)
    example = graphpp.Microbatch((x,), target=x)
    report = graphpp.verify(
        Spectral(), nn.functional.mse_loss, example=example, split=["last"], microbatches=2, tolerance=tolerance,
        backend=lambda module, examples: module,
    )
    assert report.ok, report


def test_microbatches_of_several_shapes_are_refused() -> None:
    parts = [graphpp.Microbatch((torch.randn(rows, 4),), target=torch.randn(rows, 4)) for rows in (2, 3)]
    with pytest.raises(graphpp.BatchError, match="microbatch 1 differs in shape"):
        graphpp.verify(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.functional.mse_loss, parts, split=["1"])


class Transposed(nn.Module):
    """Lets the next kernel return other strides than the trace predicts."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize("split", [["2"], ["3"]])
def test_dropout_behind_a_kernel_with_other_strides_is_equal_to_eager(split: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Transposed(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(6, 6))
    given = graphpp.Microbatch((torch.randn(4, 6, 8),), target=torch.randn(4, 8, 6))
    report = graphpp.verify(model, F.mse_loss, given, split=split)
    assert report.ok and report.eager.verdict == report.cut.verdict == "equal"


def test_only_a_dump_that_was_asked_for_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHPP_DUMP", str(tmp_path / "environment"))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    given = graphpp.Microbatch((x,), target=x)
    graphpp.verify(model, F.mse_loss, given, split=["1"])
    assert not (tmp_path / "environment").exists()
    graphpp.verify(model, F.mse_loss, given, split=["1"], debug=tmp_path / "asked")
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": 5}, "mesh: take a DeviceMesh"),
        ({"ranks": True}, "ranks: take a positive integer"),
        ({"ranks": "2"}, "ranks: take a positive integer"),
        ({"tolerance": "small"}, "tolerance: take a relative difference"),
        ({"example": 5}, "must be a graphpp.Microbatch"),
        ({"parallel": "hpu"}, "parallel.device: 'hpu' cannot be used on this machine"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    given = {"example": graphpp.Microbatch((torch.ones(2, 4),), target=torch.ones(2, 4)), **options}
    with pytest.raises(graphpp.GraphPPError, match=words):
        graphpp.verify(nn.Linear(4, 4), F.mse_loss, **given)
