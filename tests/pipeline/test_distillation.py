"""A teacher and its student: two pipelines in one process group, or one module with both, train as in one eager process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further

WIDTH, CLASSES, ROWS, STEPS, TEMPERATURE = 8, 5, 8, 3, 2.0
X = torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.randint(CLASSES, (STEPS, ROWS), generator=torch.Generator().manual_seed(1))


class Classifier(nn.Module):
    def __init__(self, seed: int, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + self.dropout(layer(x).tanh())
        return self.head(x)


def distillation(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    """The cross entropy, and the divergence from the teacher's distribution."""
    soft = F.log_softmax(target["logits"] / TEMPERATURE, -1)
    divergence = F.kl_div(F.log_softmax(logits / TEMPERATURE, -1), soft, reduction="batchmean", log_target=True)
    return F.cross_entropy(logits, target["labels"]) + TEMPERATURE**2 * divergence


def teacher_and_student() -> tuple[Classifier, Classifier]:
    return Classifier(0, dropout=0.5).requires_grad_(False), Classifier(1)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters) or [torch.zeros(1)], lr=1e-2)


def eager(teacher: nn.Module, student: nn.Module, microbatches: tuple[int, int] = (4, 4)) -> dict[str, Tensor]:
    """Train the student in one process, microbatch by microbatch; the losses of the steps, and its parameters."""
    teacher, student = deepcopy(teacher).eval(), deepcopy(student)
    optimizer, losses = optimizer_of(student.parameters()), []
    for x, y in zip(X, Y, strict=True):
        with torch.no_grad():
            logits = torch.cat([teacher(part) for part in x.chunk(microbatches[0])])
        optimizer.zero_grad()
        parts = zip(*(each.chunk(microbatches[1]) for each in (x, y, logits)), strict=True)
        values = [distillation(student(part), {"logits": soft, "labels": labels}) for part, labels, soft in parts]
        for value in values:
            (value / len(values)).backward()
        losses.append(torch.stack(values).detach().mean())
        optimizer.step()
    return {"losses": torch.stack(losses), **{fqn: each.detach() for fqn, each in student.named_parameters()}}


def distilled(rank: int, teachers: dict[str, Any], students: dict[str, Any], shared: bool = False) -> dict[str, Tensor]:
    """Train the student by the outputs of the teacher's pipeline; `teachers`, `students`: options of the two pipelines."""
    torch.set_num_threads(1)
    teacher, student = teacher_and_student()
    if shared:
        student.head = teacher.head
    kept = {"memory": graphpp.Memory(release=not shared)}
    guide = graphpp.compile(teacher, **{"schedule": "1F1B", "microbatches": 4, **kept, **teachers})
    example = graphpp.Microbatch((X[0, :2],), target={"logits": torch.zeros(2, CLASSES), "labels": Y[0, :2]})
    pipe = graphpp.compile(student, distillation, example=example, **{"microbatches": 4, **kept, **students})
    optimizer, losses = optimizer_of(pipe.parameters()), []
    for x, y in zip(X, Y, strict=True):
        logits = guide.eval(x).output
        if logits is None:
            logits = graphpp.absent((ROWS, CLASSES))
        optimizer.zero_grad()
        losses.append(pipe.step(x, target={"logits": logits, "labels": y}).loss)
        optimizer.step()
    return {"losses": torch.stack(losses), **{fqn: each.detach() for fqn, each in pipe.named_parameters()}}


def assert_equal(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert set().union(*found) == set(expected)
    for rank, each in enumerate(found):
        for name, value in each.items():
            assert torch.equal(value, expected[name]), (rank, name)


HALVES = {"split": ["layers.2"]}
V_SHAPED = {"split": ["layers.0", "layers.2", "head"], "schedule": "ZBVZeroBubble"}  # the last stage is on rank 0
CUTS = {
    "equal": (HALVES, HALVES),
    "elsewhere": ({"split": ["head"]}, {"split": ["layers.0"], "schedule": "GPipe"}),
    "the loss on the first rank": (HALVES, V_SHAPED),
    "the outputs on the first rank": (V_SHAPED, HALVES),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "cut", ["the loss on the first rank", "elsewhere", *further("equal", "the outputs on the first rank")]
)
def test_a_student_learns_from_the_teacher_s_pipeline(cut: str) -> None:
    assert_equal(run_ranks(distilled, 2, *CUTS[cut]), eager(*teacher_and_student()))


@pytest.mark.parametrize("students", [V_SHAPED, *further(HALVES, {"split": ["layers.0"], "schedule": "GPipe"})])
def test_a_frozen_module_of_both_may_be_anywhere(students: dict[str, Any]) -> None:
    teacher, student = teacher_and_student()
    student.head = teacher.head
    assert_equal(run_ranks(distilled, 2, HALVES, students, True), eager(teacher, student))


def reads_the_student_s_layer(rank: int, split: list[str]) -> str:
    """A teacher that reads a layer which its student trains."""
    torch.set_num_threads(1)
    teacher, student = teacher_and_student()
    teacher.layers[1] = student.layers[1]
    kept = graphpp.Memory(release=False)
    guide = graphpp.compile(teacher, split=split, microbatches=4, memory=kept)
    pipe = graphpp.compile(student, F.cross_entropy, split=["layers.2"], microbatches=4, memory=kept)
    optimizer = None
    for x, y in zip(X, Y, strict=True):
        try:
            output = guide.eval(x).output
        except graphpp.GraphPPError as error:
            return str(error)
        pipe.step(x, target=y)
        optimizer = optimizer or optimizer_of(pipe.parameters())
        optimizer.step()
    return "" if output is None else str(output.tolist())


@pytest.mark.exhaustive
def test_a_trained_module_of_both_is_on_one_rank_or_refused() -> None:
    alone = reads_the_student_s_layer(0, ["layers.2"])
    assert run_ranks(reads_the_student_s_layer, 2, ["layers.2"]) == ["", alone]
    for found in run_ranks(reads_the_student_s_layer, 2, ["layers.1"]):
        assert "layers.1.weight" in found
        assert "another pipeline of this process has trained" in found


class Pair(nn.Module):
    """The teacher and the student in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = teacher_and_student()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            soft = self.teacher(x)
        return self.student(x), soft


def of_pair(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return distillation(output[0], {"logits": output[1], "labels": labels})


def pair_trained(rank: int, split: list[str], schedule: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model = Pair()
    model.teacher.eval()
    pipe = graphpp.compile(model, of_pair, split=split, schedule=schedule, microbatches=4)
    optimizer, losses = None, []
    for x, y in zip(X, Y, strict=True):
        if optimizer:
            optimizer.zero_grad()
        losses.append(pipe.step(x, target=y).loss)
        optimizer = optimizer or optimizer_of(each for each in pipe.parameters() if each.requires_grad)
        optimizer.step()
    own = {fqn.removeprefix("student."): each.detach() for fqn, each in pipe.named_parameters() if "student" in fqn}
    return {"losses": torch.stack(losses), **own}


PAIRS = {
    "the teacher first": (["student.embedding"], "1F1B"),
    "within the teacher": (["teacher.layers.2"], "1F1B"),
    "within the student": (["student.layers.2"], "GPipe"),
    "four stages": (["teacher.layers.2", "student.embedding", "student.layers.2"], "ZBVZeroBubble"),
}


@pytest.mark.parametrize(
    "cut", ["within the student", "four stages", *further("the teacher first", "within the teacher")]
)
def test_one_module_with_teacher_and_student(cut: str) -> None:
    assert_equal(run_ranks(pair_trained, 2, *PAIRS[cut]), eager(*teacher_and_student()))


# ------------------------------------------------------------------------------------------------ the layout of outputs


class Image(nn.Module):
    """An output whose elements do not lie in order of memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).to(memory_format=torch.channels_last)


def image(rank: int, in_order: bool) -> str:
    """An evaluation in inference mode, in bfloat16, and a step towards its output."""
    torch.set_num_threads(1)
    guide, pipe = (
        graphpp.compile(Image(seed).bfloat16(), F.mse_loss, split=["last"], microbatches=2) for seed in (0, 1)
    )
    x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        output = guide.eval(x).output
    target = graphpp.absent((4, 2, 3, 3), torch.bfloat16) if output is None else output
    try:
        return str(float(pipe.step(x, target=target.contiguous() if in_order else target).loss))
    except graphpp.MismatchError as error:
        return str(error)


def test_outputs_in_order_of_memory_are_targets() -> None:
    alone = image(0, True)
    assert run_ranks(image, 2, True) == [alone, alone]
    assert all("strides" in found for found in run_ranks(image, 2, False))
