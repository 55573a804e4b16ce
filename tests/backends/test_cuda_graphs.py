"""Programs that are replayed as CUDA graphs, by a recorder for the CPU (`tests/cuda_graph_pool.py`)."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import graphpp
from graphpp.backends.record_programs import RECORDINGS, WARM_UPS, StepGraphs
from graphpp.passes.graph.cuda_graph_obstacles import cuda_graph_obstacle
from graphpp.runtime.gradients.gradient_sink import ReturningSink
from graphpp.runtime.program import (
    Constant,
    Gradient,
    Input,
    Loss,
    Output,
    Parameter,
    Phase,
    Program,
    Saved,
    Seed,
    Sent,
)
from tests import internals
from tests.cuda_graph_pool import Pool
from tests.exhaustive import further
from tests.movers import CopyingMover, moving_by
from tests.runtime.test_offloader import ALL
from tests.training import capturing_once, differences, eager, train


@pytest.fixture(autouse=True, scope="module")
def one_capture() -> Iterator[None]:
    with capturing_once():
        yield


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    with internals.recording_by(made):
        yield made


def affine(boxed: list[Any]) -> tuple[Any, ...]:
    """(x w + c, its transpose, x) for x, w, c."""
    x, w, c = boxed
    boxed.clear()
    y = x @ w + c
    return y, y.t(), x


PROGRAM = Program(
    0,
    Phase.FORWARD,
    (Input("args[0]"), Parameter("w"), Constant("c")),
    (Sent("y"), Saved("t"), Saved("x")),
    affine,
    shared=frozenset({0, 1, 2}),
)
W, C = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor(0.5)


class Steps:
    """Steps of programs that are recorded; each step runs every program once."""

    def __init__(self, *programs: Program, recorder: Any = None, reasons: dict[int, str] | None = None) -> None:
        self.pool = Pool() if recorder is None else recorder
        self.graphs = StepGraphs(self.pool, reasons or {})
        self.programs = programs
        self.tasks = [self.graphs.task(each) for each in programs]

    def __call__(self, *arguments: list[Any], sink: Any = None) -> list[list[Any]]:
        """The results of each program, copied before the next program runs."""
        found = []

        def run() -> None:
            for task, boxed in zip(self.tasks, arguments, strict=True):
                results = task(boxed, sink)
                assert boxed == []
                found.append([None if each is None else each.clone(memory_format=torch.preserve_format) for each in results])
                del results

        self.graphs.run_step(run, None)
        return found

    @property
    def states(self) -> list[str]:
        return [self.graphs.state_of(each) for each in self.programs]


def test_a_step_is_recorded_after_the_warm_ups_and_then_replayed() -> None:
    steps, states = Steps(PROGRAM, PROGRAM), []
    for number in range(5):
        inputs = [torch.full((3, 2), float(number)), torch.randn(3, 2)]
        for x, (y, t, same) in zip(inputs, steps(*([x.clone(), W, C] for x in inputs)), strict=True):
            assert torch.equal(y, x @ W + C)
            assert torch.equal(t, y.t())
            assert t.stride() == y.t().stride()
            assert torch.equal(same, x)
        states += steps.states[:1]
    assert states == ["not recorded yet"] * WARM_UPS + ["replayed"] * (5 - WARM_UPS)
    assert (steps.pool.warm_ups, steps.pool.recordings, steps.pool.replays) == (2 * WARM_UPS, 2, 2 * (5 - WARM_UPS))
    assert steps.pool.held == 0


def test_values_stay_until_the_recorded_step_freed_them() -> None:
    """A result that the recorded step held outlives later replays of the step; one that the step dropped does not."""
    steps = Steps(PROGRAM, PROGRAM, PROGRAM)

    def step(*, holds: bool) -> tuple[bool, bool]:
        x, kept = torch.randn(3, 2), []

        def run() -> None:
            for task in steps.tasks:
                results = task([x.clone(), W, C])
                kept.append(results[0])
                if holds and len(kept) > 1:
                    kept[0] = None
                del results

        steps.graphs.run_step(run, None)
        return tuple(each is not None and torch.equal(each, x @ W + C) for each in kept[:2])  # type: ignore[return-value]

    for _ in range(WARM_UPS + 1):
        step(holds=True)
    assert step(holds=False) == (False, True)


def test_a_result_is_read_in_place_and_other_arguments_are_copied() -> None:
    reader = Program(0, Phase.BACKWARD, (Saved("x"), Saved("t"), Seed()), (Sent("y"),), affine_of_saved)
    steps = Steps(PROGRAM, reader)
    for _ in range(WARM_UPS + 3):
        x, other = torch.randn(3, 2), torch.randn(2, 2)

        def run(x: torch.Tensor = x, other: torch.Tensor = other) -> None:
            _, t, same = steps.tasks[0]([x.clone(), W, C])
            (found,) = steps.tasks[1]([same, t, other])
            assert torch.equal(found, x @ other + (x @ W + C))

        steps.graphs.run_step(run, None)
    assert [list(task.recording.copied) for task in steps.tasks if task.recording is not None] == [[0], [2]]
    assert steps.pool.recordings == 2


def test_an_output_outlives_its_step() -> None:
    steps, kept = Steps(replace(PROGRAM, outputs=(Output(0), Saved("t"), Saved("x")))), []
    for number in range(WARM_UPS + 4):
        x = torch.full((3, 2), float(number))

        def run(x: torch.Tensor = x) -> None:
            kept.append((x, steps.tasks[0]([x.clone(), W, C])[0]))

        steps.graphs.run_step(run, None)
    assert all(torch.equal(output, x @ W + C) for x, output in kept)


def affine_of_saved(boxed: list[Any]) -> tuple[Any, ...]:
    x, t, w = boxed
    boxed.clear()
    return (x @ w + t.t(),)


def test_parameters_are_read_in_place_and_recorded_again_where_they_moved() -> None:
    steps, w, x = Steps(PROGRAM), W.clone(), torch.randn(3, 2)

    def result(w: torch.Tensor, c: torch.Tensor = C) -> torch.Tensor:
        ((y, _, _),) = steps([x.clone(), w, c])
        return y

    def settle(w: torch.Tensor, c: torch.Tensor = C) -> int:
        """Recordings, after steps in which results are right."""
        for _ in range(WARM_UPS + 2):
            assert torch.equal(result(w, c), x @ w + c)
        return steps.pool.recordings

    assert settle(w) == 1
    w.mul_(2)  # as an optimizer does
    assert settle(w) == 1
    moved = w.clone() + 1
    assert settle(moved) == 2
    assert settle(moved.t()) == 3
    whole = torch.tensor([1]).view(torch.int32)[:1]  # the same memory, read as another dtype
    assert settle(moved, whole) == 4
    assert settle(moved, whole.view(torch.float32)) == 5


def test_a_step_whose_parameters_keep_moving_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    steps, x = Steps(PROGRAM), torch.randn(3, 2)
    kept = [W + number for number in range(2 * RECORDINGS + 6)]
    with caplog.at_level(logging.WARNING, "graphpp"):
        for w in kept:
            assert torch.equal(steps([x.clone(), w, C])[0][0], x @ w + C)
    assert steps.pool.recordings == steps.pool.steps == RECORDINGS
    assert "moved" in steps.states[0]
    assert len(caplog.records) == 1


def test_gradients_are_handed_over() -> None:
    """A gradient goes to the sink; a gradient that is another result too is returned."""
    taken: dict[int, torch.Tensor] = {}

    def run(boxed: list[Any], take: Any = None) -> tuple[Any, ...]:
        take, (x,) = take or ReturningSink(), boxed
        boxed.clear()
        return take(0, x * 2), x * 3, x.sum()

    gradients = (Gradient("a"), Gradient("b"), Loss())
    steps = Steps(Program(1, Phase.BACKWARD, (Input("x"),), gradients, run, shared=frozenset({1})))
    for number in range(WARM_UPS + 3):
        taken.clear()
        x = torch.full((2,), float(number))
        (results,) = steps([x.clone()], sink=lambda index, value: taken.update({index: value}))
        assert list(taken) == [0]
        assert torch.equal(taken[0], x * 2)
        assert results[0] is None
        assert torch.equal(results[1], x * 3)


class Sums:
    """A gradient sink that adds up the gradients; matrix products are added into the sum."""

    def __init__(self) -> None:
        self.total, self.order = torch.zeros(2, 2), list[str]()

    def __call__(self, index: int, value: torch.Tensor) -> None:
        self.order.append(f"gradient {index}")
        self.total += value

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: Any = None) -> None:
        self.order.append(f"product {index}")
        self.total.addmm_(a, b)


def test_factors_are_multiplied_after_the_replay_in_the_programs_order() -> None:
    """The factors are multiplied before the next replay, which may overwrite their memory."""

    def run(boxed: list[Any], take: Any = None) -> tuple[Any, ...]:
        take, (x,) = take or ReturningSink(), boxed
        boxed.clear()
        y = x.exp()
        return y * 2, take.matmul(1, y, x), take(2, y + 1)

    gradients = (Loss(), Gradient("a"), Gradient("a"))
    plain = Program(1, Phase.BACKWARD, (Input("x"),), gradients, run, fused=True)
    steps, found, expected = Steps(plain, plain), Sums(), Sums()
    for number in range(WARM_UPS + 3):
        inputs = [torch.randn(2, 2), torch.randn(2, 2)]
        results = steps(*([x.clone()] for x in inputs), sink=found)
        for x, mine in zip(inputs, results, strict=True):
            usual = plain.run([x.clone()], expected)
            assert torch.equal(mine[0], usual[0])
            assert mine[1] is mine[2] is None, number
        assert torch.equal(found.total, expected.total)
    assert found.order == expected.order
    x = torch.randn(2, 2)
    (mine,) = Steps(plain)([x.clone()])
    for one, other in zip(mine, plain.run([x.clone()]), strict=True):
        assert torch.equal(one, other)


class Refusing(Pool):
    def capture(self, run: Any, arguments: list[Any], copied: Any) -> Any:
        arguments.clear()
        raise RuntimeError("operation not permitted when stream is capturing\nmore of this")


@pytest.mark.parametrize(
    ("program", "recorder", "reason"),
    [
        (PROGRAM, "is on cpu", "is on cpu"),
        (replace(PROGRAM, run=lambda boxed: (*affine(boxed)[:2], None)), None, "no tensor"),
        (PROGRAM, Refusing(), "operation not permitted when stream is capturing"),
    ],
)
def test_a_program_that_cannot_be_recorded_runs_as_it_is(
    program: Program, recorder: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if recorder == "is on cpu":
        recorder = Pool()
        recorder.device = torch.device("cuda", 0)
    steps, x = Steps(program, PROGRAM if recorder is None else program, recorder=recorder), torch.randn(3, 2)
    with caplog.at_level(logging.WARNING, "graphpp"):
        for _ in range(WARM_UPS + 3):
            for results in steps([x.clone(), W, C], [x.clone(), W, C]):
                assert torch.equal(results[0], x @ W + C)
    assert reason in steps.states[0]
    assert recorder is not None or steps.states[1] == "replayed"
    assert len(caplog.records) == 1
    assert "stage 0 forward" in caplog.text


def test_a_step_that_fails_is_recorded_again() -> None:
    steps, x = Steps(PROGRAM, PROGRAM), torch.randn(3, 2)

    def fail() -> None:
        steps.tasks[0]([x.clone(), W, C])
        raise ValueError("out of luck")

    for number in range(WARM_UPS + 4):
        if number in (WARM_UPS, WARM_UPS + 2):  # the step that records, and a step of replays, fail midway
            with pytest.raises(ValueError, match="out of luck"):
                steps.graphs.run_step(fail, None)
        else:
            for results in steps([x.clone(), W, C], [x.clone(), W, C]):
                assert torch.equal(results[0], x @ W + C)
    assert steps.pool.steps == 2
    assert steps.states == ["replayed"] * 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *further(("llama", {"schedule": "GPipe", "split": 2, "microbatches": 4})),
        ("skip", {"schedule": "ZBVZeroBubble", "split": 2, "microbatches": 3}),
        ("norms", {"schedule": "1F1B", "split": 1, "microbatches": 8}),
        ("tied", {"schedule": "Interleaved1F1B", "split": 4, "microbatches": 4}),
        ("several", {"schedule": "GPipe", "split": 2, "microbatches": 4}),
    ],
)
def test_the_bits_of_the_same_without_graphs(pool: Pool, name: str, options: dict[str, Any]) -> None:
    found = train(0, name, {**options, "backend": graphpp.Eager(cudagraphs=True)})
    replays = pool.replays
    with internals.recording_by(None):
        assert differences(found, train(0, name, options)) == []
    assert pool.replays == replays > 0


def test_and_of_an_eager_one(pool: Pool) -> None:
    found = train(0, "norms", {"schedule": "1F1B", "split": 2, "microbatches": 4, "backend": graphpp.Eager(cudagraphs=True)})
    assert differences(found, eager("norms", 4)) == []
    assert pool.replays > 0


def test_with_offload(pool: Pool) -> None:
    mover = CopyingMover()
    with moving_by(mover):
        options = {
            "schedule": "GPipe",
            "split": 2,
            "microbatches": 4,
            "memory": graphpp.Memory(offload=ALL),
            "backend": graphpp.Eager(cudagraphs=True),
        }
        assert differences(train(0, "skip", options), eager("skip", 4)) == []
    assert mover.moved > 0
    assert pool.replays > 0


def small(**options: Any) -> graphpp.Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    options = {"schedule": "1F1B", **options}
    return graphpp.compile(model, nn.functional.mse_loss, split=["2"], microbatches=4, **options)


def test_states_say_what_is_replayed_and_why_not(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pipe, batch = small(backend=graphpp.Eager(cudagraphs=True)), torch.randn(8, 4)
    assert pipe.cudagraphs == {}
    with caplog.at_level(logging.WARNING, "graphpp"):
        for _ in range(3):
            pipe.step(batch, target=batch)
    assert set(pipe.cudagraphs) == {f"stage {stage} {phase}" for stage in (0, 1) for phase in ("forward", "backward")}
    assert "random numbers" in pipe.cudagraphs["stage 0 forward"]
    assert pipe.cudagraphs["stage 1 forward"] == pipe.cudagraphs["stage 1 backward"] == "replayed"
    assert [record for record in caplog.records if "stage 0 forward" in record.message] == caplog.records[:1]


def test_evaluation_is_replayed_too(pool: Pool) -> None:
    pipe = small(backend=graphpp.Eager(cudagraphs=True))
    for _ in range(3):
        batch = torch.randn(8, 4)
        with torch.no_grad():
            model = pipe._model.eval()  # microbatch by microbatch: a BLAS may round a product of 8 rows otherwise than one of 2
            expected = torch.cat([model(rows) for rows in batch.chunk(4)])
        assert torch.equal(pipe.eval(batch).output, expected)
    assert pool.replays > 0


def test_on_the_cpu_there_are_none_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe, batch = small(backend=graphpp.Eager(cudagraphs=True)), torch.randn(8, 4)
    with caplog.at_level(logging.WARNING, "graphpp"):
        pipe.step(batch, target=batch)
        pipe.eval(batch)
    assert len(caplog.records) == 1
    assert all("only CUDA devices" in state for state in pipe.cudagraphs.values())
    assert pipe.cudagraphs
    with pytest.raises(graphpp.GraphPPError, match="cudagraphs"):
        small(backend=graphpp.Eager(cudagraphs=1))


def test_obstacles_in_a_graph() -> None:
    def graph(operator: Any) -> torch.fx.Graph:
        made = torch.fx.Graph()
        made.output((made.call_function(operator, (made.placeholder("x"),)),))
        return made

    aten = torch.ops.aten
    assert cuda_graph_obstacle(graph(aten.relu.default)) is None
    for operator in (aten.nonzero.default, aten._local_scalar_dense.default, aten._linalg_check_errors.default):
        assert "the host waits" in (cuda_graph_obstacle(graph(operator)) or "")
    assert "other ranks" in (cuda_graph_obstacle(graph(torch.ops._c10d_functional.wait_tensor.default)) or "")
    assert cuda_graph_obstacle(graph(aten.t.default)) == "it computes nothing"
    on_cpu = graph(aten.relu.default)
    next(iter(on_cpu.nodes)).meta["val"] = torch.zeros(1)
    assert cuda_graph_obstacle(on_cpu) == "x is on the cpu"
    assert cuda_graph_obstacle(on_cpu, "cpu") is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_the_host_counts_masks_alone(dtype: torch.dtype) -> None:
    """Rows picked by positions keep the device busy; those picked by a mask are counted by the host."""
    made = torch.fx.Graph()
    x, at = made.placeholder("x"), made.placeholder("at")
    x.meta["val"], at.meta["val"] = torch.zeros(4, 2, device="meta"), torch.ones(4, dtype=dtype, device="meta")
    made.output(picked := made.call_function(torch.ops.aten.index.Tensor, (x, [None, at])))
    picked.meta["val"] = torch.zeros(4, 4, device="meta")
    obstacle = cuda_graph_obstacle(made, "meta")
    assert obstacle is None if dtype in (torch.int64, torch.int32) else "the host waits for index" in str(obstacle)
