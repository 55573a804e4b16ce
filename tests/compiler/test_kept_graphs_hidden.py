"""Programs that reach data in hidden ways: after an edit of it, no later run takes the graph that was kept before."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.compiler.test_kept_graphs import X, captures

MODEL = """
import torch
from torch import nn
from hidden_helper import *

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.name, self.table = nn.Linear(4, 4), "FACTOR", None
        self.registered = made_here()
    def forward(self, x):
        return self.linear(x) * scale(self)
"""
HELPER = """
import builtins, functools, logging, sys, types
import torch
from torch import nn
import hidden_numbers
def value(module, name):
    return getattr(module, name)
def made_here():
    return None
def read_number():
    with open("numbers.txt") as file:
        return float(file.read())
"""
NUMBERS = """
FACTOR = 2.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GRAPHPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GRAPHPP_KEEP_GRAPHS", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("hidden_model", "hidden_helper", "hidden_numbers"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def loss_of_program(folder: Path, helper: str, numbers: str, text: str) -> tuple[int, float]:
    """A run of the program with these texts; the loss is that of a plain loop."""
    forget()
    (folder / "hidden_model.py").write_text(MODEL)
    (folder / "hidden_helper.py").write_text(HELPER + textwrap.dedent(helper))
    (folder / "hidden_numbers.py").write_text(numbers)
    (folder / "numbers.txt").write_text(text)
    torch.manual_seed(0)
    model = importlib.import_module("hidden_model").Model()
    count, value = captures(model, torch.nn.functional.mse_loss, split=1)
    with torch.no_grad():
        plain = float(torch.stack([torch.nn.functional.mse_loss(model(part), part) for part in X.split(3)]).mean())
    assert value == pytest.approx(plain, rel=1e-6)
    return count, value


@pytest.mark.parametrize(
    "helper",
    [
        "def scale(model): return getattr(hidden_numbers, 'FAC' + 'TOR')",
        "def scale(model): return value(hidden_numbers, model.name)",
        "def scale(model): return vars(hidden_numbers)[model.name]",
        "def scale(model): return hidden_numbers.__dict__[model.name]",
        "def scale(model): return sys.modules['hidden_numbers'].FACTOR",
        "def scale(model): return eval('hidden_numbers.FACTOR')",
        "def scale(model):\n    from hidden_numbers import FACTOR\n    return FACTOR",
        "def scale(model):\n    import hidden_numbers as numbers\n    return value(numbers, model.name)",
        "builtins.HIDDEN_FACTOR = hidden_numbers.FACTOR\ndef scale(model): return HIDDEN_FACTOR",
        "class Base: pass\nclass One(Base): factor = hidden_numbers.FACTOR\n"
        "def scale(model): return [each.factor for each in Base.__subclasses__()][0]",
        "C = types.new_class('C', (), {}, lambda space: space.update(scale=hidden_numbers.FACTOR))\n"
        "def scale(model): return C.scale",
        "LOG = logging.getLogger('hidden')\nLOG.setLevel(int(hidden_numbers.FACTOR * 10))\n"
        "def scale(model): return 2.0 if LOG.isEnabledFor(25) else 3.0",
    ],
)
def test_a_number_that_is_reached_in_a_hidden_way_means_a_new_capture(helper: str, folder: Path) -> None:
    first = loss_of_program(folder, helper, "FACTOR = 2.0", "")
    loss_of_program(folder, helper, "FACTOR = 2.0", "")
    second = loss_of_program(folder, helper, "FACTOR = 3.0", "")
    assert second[0] == 1 and second[1] != first[1]


@pytest.mark.parametrize(
    "helper",
    [
        "def scale(model): return read_number()",
        "CACHE = {}\ndef scale(model):\n    if not CACHE: CACHE[0] = read_number()\n    return CACHE[0]",
        "@functools.cache\ndef factor(): return read_number()\ndef scale(model): return factor()",
        "def scale(model):\n    import pathlib\n    return float(pathlib.Path('numbers.txt').read_text())",
    ],
)
def test_a_graph_that_depends_on_a_file_is_not_kept(helper: str, folder: Path) -> None:
    first = loss_of_program(folder, helper, NUMBERS, "2.0")
    second = loss_of_program(folder, helper, NUMBERS, "3.0")
    assert second[0] == 1 and second[1] != first[1]


def test_whole_numbers_of_library_classes_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = "def scale(model): return model.linear.hidden_factor"
    monkeypatch.setattr(torch.nn.Linear, "hidden_factor", 2, raising=False)
    loss_of_program(folder, helper, NUMBERS, "")
    assert loss_of_program(folder, helper, NUMBERS, "")[0] == 0
    monkeypatch.setattr(torch.nn.Linear, "hidden_factor", 3)
    assert loss_of_program(folder, helper, NUMBERS, "")[0] == 1


@pytest.mark.parametrize(
    "helper",
    [
        "from torch.utils.checkpoint import checkpoint\n"
        "def scale(model): return checkpoint(torch.sin, model.linear.weight, use_reentrant=False).sum()",
        "def made_here(): return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))\n"
        "def scale(model): return model.registered.weight.sum()",
        "def made_here(): return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval()\n"
        "def scale(model): return model.registered.weight.sum()",
    ],
)
def test_checkpointed_and_parametrized_models_are_found_again(helper: str, folder: Path) -> None:
    for _ in range(2):  # the first capture of a process changes state of torch's checkpoints, so the second may be a new one
        loss_of_program(folder, helper, NUMBERS, "")
    assert loss_of_program(folder, helper, NUMBERS, "")[0] == 0
