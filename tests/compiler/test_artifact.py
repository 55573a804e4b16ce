"""Graphs that a first start saves in the folder of `artifact=` and a later one loads, unless something has changed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphpp
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
FILES = {
    "saved_helper.py": """
import torch
FACTOR = 2.0
def activation(x):
    return torch.tanh(x) * FACTOR
""",
    "saved_model.py": """
import os
import torch
from torch import nn
import saved_helper

class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.depth, self.shift = depth, torch.linspace(0, 1, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    def forward(self, x):
        for layer in self.layers[:self.depth]:
            x = saved_helper.activation(layer(x)) + self.shift
        return self.layers[3](x) * float(os.environ.get("GRAPHPP_TEST_SCALE", "1"))

def loss_with(weight):
    def loss(output, target):
        return weight * (output - target).pow(2).mean()
    return loss

def made():
    torch.manual_seed(0)
    return Model(), loss_with(0.5)
""",
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of a program that can be imported."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that is edited twice in a second would keep its old bytecode
    yield tmp_path
    forget()


def forget() -> None:
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
    importlib.invalidate_caches()


def run(program: Path, sizes: tuple[int, ...] = (6,), change: Callable[[Any], Any] = lambda model: None) -> int:
    """How often a start of the program as its files are now captures; the losses are those of a plain loop."""
    forget()
    model, loss = importlib.import_module("saved_model").made()
    change(model)
    with internals.captures() as captures:
        pipe = graphpp.compile(model, loss, split=2, microbatches=2, artifact=program / "graphs")
        for size in sizes:
            x = X.repeat(2, 1)[:size]
            plain = torch.stack([loss(model(part), part) for part in x.split(size // 2)]).detach()
            assert torch.equal(pipe.step(x, target=x).losses, plain)
    return len(captures)


def graphs(program: Path) -> list[Path]:
    return sorted((program / "graphs").iterdir())


def test_a_later_start_captures_nothing(program: Path) -> None:
    assert [run(program), run(program)] == [1, 0]
    assert len(graphs(program)) == 1


def test_graphs_of_several_sizes_are_saved_and_loaded(program: Path) -> None:
    assert run(program, (6, 8, 12)) == 2  # for the first size, for all sizes
    assert run(program, (6, 8, 12)) == 0


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("saved_model.py", "loss_with(0.5)", "loss_with(0.25)"),
        ("saved_helper.py", "FACTOR = 2.0", "FACTOR = 3.0"),
        *further(
            ("saved_model.py", "depth=2", "depth=3"),
            ("saved_model.py", "* float(", "/ float("),
            ("saved_helper.py", "torch.tanh", "torch.sigmoid"),
        ),
    ],
)
def test_an_edit_means_a_new_capture(program: Path, file: str, old: str, new: str) -> None:
    assert run(program) == 1
    text = (program / file).read_text()
    assert text.count(old) == 1
    (program / file).write_text(text.replace(old, new))
    assert [run(program), run(program)] == [1, 0]
    assert len(graphs(program)) == 2


CHANGES: list[Callable[[Any], Any]] = [
    lambda model: model.layers[0].weight.requires_grad_(False),
    lambda model: model.layers[1].register_forward_hook(lambda module, args, output: output * 2),
    lambda model: model.layers[1].eval(),
    lambda model: setattr(model, "depth", 3),
    lambda model: setattr(model, "shift", torch.zeros(4)),
]


@pytest.mark.parametrize("change", [*CHANGES[:2], *further(*CHANGES[2:])])
def test_a_changed_model_has_a_graph_of_its_own(program: Path, change: Callable[[Any], Any]) -> None:
    assert [run(program), run(program, change=change), run(program)] == [1, 1, 0]


def swapped(path: Path, program: Path) -> None:
    """The graph of a changed model under the name of another one."""
    run(program, change=lambda model: setattr(model, "depth", 3))
    (other,) = set(graphs(program)) - {path}
    other.replace(path)


DAMAGES: list[Callable[[Path, Path], Any]] = [
    lambda path, program: path.write_text(path.read_text()[:-5]),
    lambda path, program: path.write_text(path.read_text().replace("mul.Tensor", "add.Tensor")),
    lambda path, program: path.write_bytes(b"\xff\xfe"),
    lambda path, program: path.write_text("{}\n{}"),
    swapped,
]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("damage", [*DAMAGES[:2], *further(*DAMAGES[2:])])
def test_a_damaged_or_foreign_file_is_not_loaded(
    program: Path, damage: Callable[[Path, Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    run(program)
    damage(graphs(program)[0], program)
    caplog.clear()
    assert run(program) == 1
    assert "the model is captured, because" in caplog.text
    assert run(program) == 0


def test_a_folder_that_cannot_be_written_costs_no_step(program: Path, caplog: pytest.LogCaptureFixture) -> None:
    (program / "graphs").write_text("a file")
    assert run(program) == 1
    assert "cannot be saved" in caplog.text


def test_a_failed_save_leaves_no_file(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    assert run(program) == 1
    assert list((program / "graphs").iterdir()) == []


def test_verify_checks_the_graph_in_the_folder(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads the environment, which graphpp cannot know: the user answers for it, and `verify` tells."""
    run(program)
    model, loss = importlib.import_module("saved_model").made()
    batch = graphpp.Microbatch((X[:3],), target=X[:3])

    def verified() -> graphpp.Verification:
        return graphpp.verify(model, loss, batch, split=2, artifact=program / "graphs")

    with internals.captures() as captures:
        assert verified().ok
        monkeypatch.setenv("GRAPHPP_TEST_SCALE", "3")
        assert not verified().ok
        model.depth = 3
        with pytest.raises(graphpp.GraphPPError, match=r"artifact: .* has no graph of this model for such a microbatch"):
            verified()
    assert not captures


def started(rank: int, folder: Path) -> tuple[int, int, list[float]]:
    """How often this rank captures and reads a file in a step and an evaluation, and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reads: list[str] = []
    sys.addaudithook(lambda event, args: reads.append(args[0]) if event == "open" and str(folder) in str(args[0]) else None)
    with internals.captures() as captures:
        pipe = graphpp.compile(model, F.mse_loss, split=2, schedule="1F1B", microbatches=2, artifact=folder)
        losses = [float(pipe.step(X, target=X).loss) for _ in range(2)]
        pipe.eval(X)
    return len(captures), len(reads), losses


def test_the_first_rank_alone_reads_and_writes_the_folder(tmp_path: Path) -> None:
    first, second = run_ranks(started, 2, tmp_path / "graphs"), run_ranks(started, 2, tmp_path / "graphs")
    assert [each[0] for each in (*first, *second)] == [2, 0, 0, 0]
    assert first[1][1] == second[1][1] == 0 < second[0][1]
    assert [each[2] for each in second] == [each[2] for each in first]
