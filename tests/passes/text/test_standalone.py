"""Dumped files run with torch alone, and a pipeline that loads its programs from them computes the same numbers."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import graphpp
from graphpp.passes.text.render import RenderedGraph, render
from graphpp.passes.text.standalone import Origin, standalone
from tests.exhaustive import further
from tests.models import MODELS, Case, cuts
from tests.reference import gradients


def load(file: Path) -> ModuleType:
    """A dumped file as a module, without running its `main`."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(name: str, folder: Path | None = None) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Losses and gradients of one step of a test model in two stages."""
    case = MODELS[name]()
    return step_of(case, cuts(name, 2), folder)


def step_of(case: Case, split: list[str], folder: Path | None) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(1)
    pipe = graphpp.compile(case.model, case.loss, split=split, microbatches=4, debug=folder)
    losses = pipe.step(*case.batch.args, target=case.batch.target, **case.batch.kwargs).losses
    return losses, gradients(case.model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of one training step of the Llama."""
    folder = tmp_path_factory.mktemp("llama")
    step("llama", folder)
    return folder / "rank0/train"


@pytest.fixture
def from_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """Make pipelines load their programs from a folder; returns the list of the files loaded."""

    def redirect(folder: Path) -> list[str]:
        taken: list[str] = []

        def from_file(_: RenderedGraph, filename: str) -> Any:
            stage, phase = re.search(r"stage (\d+) (\w+)", filename).groups()  # type: ignore[union-attr]
            taken.append(f"stage{stage}_{phase}.py")
            return load(folder / taken[-1]).run

        monkeypatch.setattr(RenderedGraph, "load", from_file)
        return taken

    return redirect


def assert_same(one: tuple[Tensor, dict[str, Tensor | None]], two: tuple[Tensor, dict[str, Tensor | None]]) -> None:
    assert torch.equal(one[0], two[0])
    assert one[1].keys() == two[1].keys()
    for fqn, gradient in one[1].items():
        other = two[1][fqn]
        assert gradient is other is None or torch.equal(gradient, other), fqn  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sequential", *further("llama")])
def test_a_pipeline_of_dumped_files_gives_the_same_numbers(
    name: str, tmp_path: Path, from_files: Callable[[Path], list[str]]
) -> None:
    expected = step(name, tmp_path)
    taken = from_files(tmp_path / "rank0/train/programs")
    assert_same(step(name), expected)
    assert sorted(taken) == sorted(path.name for path in tmp_path.glob("rank0/train/programs/*.py"))


def test_every_file_of_the_llama_runs(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped = sorted(llama.rglob("*.py"))
    assert len(dumped) > 8
    for file in dumped:
        module = load(file)
        module.main()
        assert len(capsys.readouterr().out.splitlines()) == len(module.RESULTS)


def test_a_file_runs_in_a_process_of_its_own_and_prints_its_results(tmp_path: Path) -> None:
    step("sequential", tmp_path)
    file = tmp_path / "rank0/train/programs/stage1_backward.py"
    command = [sys.executable, "-I", "-W", "error", file.name]
    printed = subprocess.run(command, cwd=file.parent, check=True, capture_output=True, text=True).stdout
    assert "gradient of 9.weight: float32[10, 16]\n" in printed
    assert re.search(r"sent \w+: float32\[6, 16\]\n", printed)


def origin(**changes: Any) -> Origin:
    return Origin(**{"title": "a graph", "made_by": "00_test", "seconds": 0.25, "file": "a.py", **changes})


def graph_of(target: Any, *args: Any) -> fx.Graph:
    """`target(x, *args)` of a tensor x [3]."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(3)
    graph.output((graph.call_function(target, (x, *args)),))
    return graph


def test_an_operator_of_another_library_is_named_in_the_header(tmp_path: Path) -> None:
    with torch.library._scoped_library("graphpp_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CPU")
        graph = graph_of(torch.ops.graphpp_test.double.default)
        file = tmp_path / "a.py"
        file.write_text(standalone(graph, render(graph), origin()))
        assert "needs     the library that defines torch.ops.graphpp_test: import it first" in file.read_text()
        load(file).main()


def test_an_object_that_cannot_be_spelled_is_named_in_the_header(tmp_path: Path) -> None:
    graph = graph_of(torch.ops.aten.mul.Tensor, object())
    file = tmp_path / "a.py"
    file.write_text(standalone(graph, render(graph), origin(title='odd """title"""')))
    module = load(file)
    assert module.__doc__.startswith("odd '''title'''\n\npass      00_test, 250.0 ms\nversions  torch 2.")
    assert "needs     _bound_0, which cannot be spelled: builtins.object: this file cannot run" in module.__doc__
    with pytest.raises(SystemExit, match="cannot run by itself, needs _bound_0"):
        module.main()
