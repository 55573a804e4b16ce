"""Captured graphs that later runs find in the cache folder, and the changes of a program after which it captures anew."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.cache.disk_cache import DiskCache
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.training import CASES

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
FILES = {
    "kept_helper.py": """
        import os
        import torch
        FACTOR = 2.0
        TABLE = {"a": torch.tanh}
        def activation(x):
            return TABLE["a"](x) * FACTOR
        def unused(x):
            return x
    """,
    "kept_base.py": """
        from torch import nn
        class Base(nn.Module):
            def after(self, x):
                return x + 1.0
    """,
    "kept_model.py": """
        from dataclasses import dataclass
        import torch
        from torch import nn
        import kept_helper
        from kept_base import Base

        @dataclass
        class Config:
            depth: int = 2
            bias: bool = True

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                return grad * 2

        class Model(Base):
            def __init__(self, config):
                super().__init__()
                self.config = config
                self.layers = nn.ModuleList(nn.Linear(4, 4, bias=config.bias) for _ in range(4))
            def forward(self, x):
                for layer in self.layers:
                    x = kept_helper.activation(layer(x))
                for _ in range(self.config.depth):
                    x = Twice.apply(x)
                return self.after(x)

        def loss_with(weight):
            def loss(output, target):
                return weight * (output - target).pow(2).mean()
            return loss

        def made():
            torch.manual_seed(0)
            return Model(Config()), loss_with(0.5)
    """,
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of a program that can be imported, and a new cache folder."""
    for name, text in FILES.items():
        lines = text.strip("\n").splitlines()
        (tmp_path / name).write_text("\n".join(line[8:] for line in lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GRAPHPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GRAPHPP_KEEP_GRAPHS", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that is edited twice in a second would keep its old bytecode
    yield tmp_path
    forget()


def forget() -> None:
    for name in (*FILES, "kept_numbers.py"):
        sys.modules.pop(name.removesuffix(".py"), None)
    importlib.invalidate_caches()


def captures(model: nn.Module, loss: Any, x: Tensor = X, split: Any = ("second",), **options: Any) -> tuple[int, float]:
    """How often a first step captures, and its loss."""
    with internals.captures() as found:
        pipe = graphpp.compile(model, loss, split=split, microbatches=2, **options)
        value = float(pipe.step(x, target=x).loss)
    return len(found), value


def run_program() -> tuple[int, float]:
    """A run of the program as its files are now; the loss is that of a plain loop."""
    forget()
    model, loss = importlib.import_module("kept_model").made()
    count, value = captures(model, loss, split=2)
    plain = float(torch.stack([loss(model(part), part) for part in X.split(3)]).mean().detach())
    assert value == pytest.approx(plain, rel=1e-6)
    return count, value


def run_with_sizes(sizes: list[int]) -> int:
    """How often a run captures that steps with batches of these sizes; the losses are those of a plain loop."""
    forget()
    model, loss = importlib.import_module("kept_model").made()
    with internals.captures() as made:
        pipe = graphpp.compile(model, loss, split=2, microbatches=2)
        for size in sizes:
            x = X.repeat(2, 1)[:size]
            plain = float(torch.stack([loss(model(part), part) for part in x.split(size // 2)]).mean().detach())
            assert float(pipe.step(x, target=x).loss) == pytest.approx(plain, rel=1e-6)
    return len(made)


def test_a_graph_for_several_sizes_is_captured_in_every_run(program: Path) -> None:
    assert run_with_sizes([6, 8, 12]) == 3  # for the first size, for the second one, for all sizes
    assert run_with_sizes([6, 8, 12]) == 2
    assert run_with_sizes([8, 6, 12]) == 3


def test_a_later_run_captures_nothing(program: Path) -> None:
    first = run_program()
    assert first[0] == 1
    assert run_program() == (0, first[1])
    (program / "kept_model.py").write_text((program / "kept_model.py").read_text() + "\n# a comment\nOTHER = 3\n")
    assert run_program() == (0, first[1])


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kept_model.py", "x = Twice.apply(x)", "x = Twice.apply(x) + 1"),
        ("kept_model.py", "return grad * 2", "return grad * 3"),
        ("kept_model.py", "loss_with(0.5)", "loss_with(0.25)"),
        ("kept_model.py", "depth: int = 2", "depth: int = 3"),
        ("kept_model.py", "bias: bool = True", "bias: bool = False"),
        ("kept_base.py", "x + 1.0", "x + 1.5"),
        ("kept_helper.py", "FACTOR = 2.0", "FACTOR = 3.0"),
        ("kept_helper.py", "torch.tanh}", "torch.sigmoid}"),
        ("kept_helper.py", "* FACTOR", "/ FACTOR"),
    ],
)
def test_an_edit_means_a_new_capture(program: Path, file: str, old: str, new: str) -> None:
    check_edit(program / file, old, new)


def check_edit(file: Path, old: str, new: str) -> None:
    """The program finds its kept graph, captures anew after the edit, and then finds the new graph."""
    assert run_program()[0] == 1
    assert run_program()[0] == 0
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    assert run_program()[0] == 1
    assert run_program()[0] == 0


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.second(F.gelu(self.first(x))), -1)


def other_gelu(x: Tensor) -> Tensor:
    return torch.relu(x)


def other_linear(self: nn.Linear, x: Tensor) -> Tensor:
    return x @ self.weight


@pytest.mark.parametrize(
    "replace",
    [
        lambda patch: patch.setattr(F, "gelu", other_gelu),
        lambda patch: patch.setattr(nn.Linear, "forward", other_linear),
        lambda patch: patch.setattr(F, "softmax", F.log_softmax),
    ],
)
def test_a_library_whose_code_is_replaced_is_captured_anew(
    program: Path, replace: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = captures(OneLinear(), F.mse_loss)
    assert before[0] == 1 and captures(OneLinear(), F.mse_loss) == (0, before[1])
    with monkeypatch.context() as patch:
        replace(patch)
        replaced = captures(OneLinear(), F.mse_loss)
        assert replaced[0] == 1 and replaced[1] != before[1]
        captures(OneLinear(), F.mse_loss)  # of code of the user in a library no graph is kept
    assert captures(OneLinear(), F.mse_loss)[1] == before[1]


WRAPPED = """
import functools
from contextvars import ContextVar
from enum import Enum
import torch
from torch import nn
import kept_numbers

def scaled(function):
    @functools.wraps(function)
    def scaled_function(x):
        return function(x) * 2.0
    return scaled_function

class Kind(Enum):
    ONE = 1
    def __init__(self, number):
        self.scale = number * 2.0

class Meta(type):
    scale = 2.0

class Scales(metaclass=Meta):
    pass

SCALE = ContextVar("scale", default=2.0)
ORDER = {"a": torch.tanh, "b": torch.exp}

def guarded(x):
    try:
        x = torch.tanh(x)
    except RuntimeError:
        x = torch.exp(x) * 2.0
    return x

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return kept_numbers.times(grad)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.act = scaled(torch.nn.functional.silu)
    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x)) * Kind.ONE.scale + Scales.scale + SCALE.get()
        for function in ORDER.values():
            x = function(x)
        return guarded(Twice.apply(x)) * getattr(kept_numbers, "FACTOR")

def made():
    torch.manual_seed(0)
    return Model(), nn.functional.mse_loss
"""
NUMBERS = """
FACTOR = 2.0
def times(grad):
    return grad * 2
"""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kept_model.py", "function(x) * 2.0", "function(x) * 3.0"),
        ("kept_model.py", "number * 2.0", "number * 3.0"),
        ("kept_model.py", "    scale = 2.0", "    scale = 3.0"),
        ("kept_model.py", "default=2.0", "default=3.0"),
        ("kept_model.py", '{"a": torch.tanh, "b": torch.exp}', '{"b": torch.exp, "a": torch.tanh}'),
        ("kept_model.py", "except RuntimeError", "except ValueError"),
        ("kept_numbers.py", "FACTOR = 2.0", "FACTOR = 3.0"),
        ("kept_numbers.py", "grad * 2", "grad * 3"),
    ],
)
def test_edits_in_unusual_places_mean_a_new_capture(program: Path, file: str, old: str, new: str) -> None:
    (program / "kept_model.py").write_text(WRAPPED)
    (program / "kept_numbers.py").write_text(NUMBERS)
    check_edit(program / file, old, new)


def test_other_shapes_modes_and_flags_have_graphs_of_their_own(program: Path) -> None:
    model = OneLinear()
    assert captures(model, F.mse_loss)[0] == 1
    assert captures(model, F.mse_loss, X[:2])[0] == 1
    model.first.weight.requires_grad_(False)
    assert captures(model, F.mse_loss)[0] == 1
    model.second.register_forward_hook(lambda module, args, output: output * 2)
    assert captures(model, F.mse_loss)[0] == 1
    assert captures(model.double(), F.mse_loss, X.double())[0] == 1
    assert captures(OneLinear(), F.mse_loss)[0] == 0


def test_nothing_is_kept_if_the_option_says_so(program: Path) -> None:
    for _ in range(2):
        assert captures(OneLinear(), F.mse_loss, debug=graphpp.Debug(keep_graphs=False))[0] == 1
    assert graphpp.cache.entries() == []


def damaged(path: Path) -> None:
    path.write_text(path.read_text()[:-5])


@pytest.mark.parametrize("file", ["graph.json", "evidence.json", "manifest.json"])
def test_a_torn_entry_is_made_again(program: Path, file: str) -> None:
    before = captures(OneLinear(), F.mse_loss)
    (entry,) = graphpp.cache.entries()
    damaged(graphpp.cache.folder() / entry.key / file)
    assert captures(OneLinear(), F.mse_loss) == before
    assert captures(OneLinear(), F.mse_loss) == (0, before[1])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("graph.json", "{}"),
        ("graph.json", '{"version": 3}'),
        ("evidence.json", "[]"),
        ("evidence.json", "nonsense"),
        *further(*(("graph.json", text) for text in ("[]", "nonsense"))),
        *further(*(("evidence.json", text) for text in ("{}", '{"version": 3}'))),
    ],
)
def test_a_foreign_entry_is_made_again(program: Path, file: str, text: str) -> None:
    before = captures(OneLinear(), F.mse_loss)
    (entry,) = graphpp.cache.entries()
    folder = graphpp.cache.folder() / entry.key
    (folder / file).write_text(text)
    (folder / "manifest.json").unlink()
    with DiskCache(graphpp.cache.folder()).entry("other") as other:
        for path in folder.iterdir():
            path.rename(other / path.name)
    folder.rmdir()
    (graphpp.cache.folder() / "other").rename(folder)  # complete, with a manifest of its own
    assert captures(OneLinear(), F.mse_loss) == before
    assert captures(OneLinear(), F.mse_loss) == (0, before[1])


def test_a_full_disk_stops_nothing(program: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    write = Path.write_text

    def full(path: Path, text: str) -> int:
        if path.name == "graph.json":
            raise OSError(28, "No space left on device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", full)
    for _ in range(2):
        assert captures(OneLinear(), F.mse_loss)[0] == 1
    assert "cannot be kept for later runs" in caplog.text


def on_two_ranks(rank: int, folder: str) -> tuple[int, float, list[str]]:
    """How often a rank captures, its loss, and the reasons that it logs for a capture."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("graphpp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    os.environ["GRAPHPP_CACHE"] = folder
    try:
        count, loss = captures(OneLinear(), F.mse_loss, schedule="1F1B", debug=graphpp.Debug(keep_graphs=True))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return count, loss, [text for text in said if "captured" in text or "kept" in text]


def test_the_first_of_several_ranks_keeps_the_graph(tmp_path: Path) -> None:
    first = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert [count for count, _, _ in first] == [1, 0]
    second = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert [count for count, _, _ in second] == [0, 0], second
    assert [loss for _, loss, _ in first] == [loss for _, loss, _ in second]


ALONE = """
import sys
import torch
import graphpp
model, x = torch.nn.Linear(4, 4), torch.zeros(2, 4)
graphpp.compile(model, torch.nn.functional.mse_loss, example=graphpp.Microbatch((x,), target=x), microbatches=1)
print(*(name for name in ("torch.export._trace", "torch._functorch.aot_autograd") if name in sys.modules))
"""


def test_another_process_finds_the_graph_and_loads_no_tracer(program: Path) -> None:
    """Dynamo loads libraries, with modules of Cython, and these register classes: both are no change of the program."""
    (program / "alone.py").write_text(ALONE)

    def run() -> list[str]:
        command = [sys.executable, str(program / "alone.py")]
        root = os.environ | {"PYTHONPATH": str(Path(graphpp.__file__).parents[1])}
        return subprocess.run(command, env=root, capture_output=True, text=True, check=True).stdout.split()

    assert run() == ["torch.export._trace", "torch._functorch.aot_autograd"]
    assert run() == []


@pytest.mark.parametrize("name", ["hf_gpt2", "tied", "masked", "several"])
def test_a_kept_graph_trains_with_the_same_bits(name: str, program: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphpp")

    def steps() -> list[Tensor]:
        case = CASES[name](0)
        pipe = graphpp.compile(case.model, case.loss, split=2, microbatches=4)
        batch = case.batch
        found = [pipe.step(*batch.args, target=batch.target, **batch.kwargs).losses]
        return [*found, *(p.grad for p in pipe.parameters() if p.grad is not None)]

    first = steps()
    assert len(graphpp.cache.entries()) == 1
    assert all(torch.equal(one, other) for one, other in zip(first, steps(), strict=True))
