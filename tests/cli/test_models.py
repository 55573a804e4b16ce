"""Models that a command line names by a function."""

import sys
from pathlib import Path

import pytest
import torch

from graphpp.cli.models import load_model
from graphpp.errors import GraphPPError
from tests.cli.running import write

CODE = """
    import sys
    from dataclasses import dataclass
    from typing import Any, NamedTuple

    import torch
    from torch import nn

    import graphpp

    def example():
        return graphpp.Microbatch((torch.randn(2, 4),), target=torch.randn(2, 4))

    def build():
        return nn.Linear(4, 4), nn.functional.mse_loss, example()

    @dataclass
    class Parts:
        model: Any
        loss: Any
        example: Any

    class Turned(NamedTuple):
        example: Any
        loss: Any
        model: Any

    class Lacking(NamedTuple):
        model: Any
        loss: Any

    def parts(): return Parts(*build())
    def turned(): return Turned(*reversed(build()))
    def without_loss(): return nn.Linear(4, 4), None, example()
    class Holder:
        @staticmethod
        def build(): return build()

    def raises(): raise ValueError("no data")
    def exits(): sys.exit(3)
    def number(): return 7
    def pair(): return nn.Linear(4, 4), None
    def lacking(): return Lacking(nn.Linear(4, 4), None)
    def alone(): return nn.Linear(4, 4)
    def class_for_model(): return nn.Linear, None, example()
    def number_for_loss(): return nn.Linear(4, 4), 3, example()
    def class_for_loss(): return nn.Linear(4, 4), nn.MSELoss, example()
    def tensor_for_example(): return nn.Linear(4, 4), None, torch.ones(2, 4)
    def needs(x): return x
    model = nn.Linear(4, 4)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "models_to_load.py", CODE))


@pytest.mark.parametrize("name", ["build", "parts", "turned", "Holder.build"])
def test_a_function_gives_model_loss_and_example(file: str, name: str) -> None:
    found = load_model(f"{file}:{name}")
    assert isinstance(found.model, torch.nn.Linear)
    assert found.loss is torch.nn.functional.mse_loss
    assert found.example.args[0].shape == found.example.target.shape == (2, 4)


def test_on_the_meta_device_nothing_has_memory(file: str) -> None:
    found = load_model(f"{file}:build", meta=True)
    assert {each.device.type for each in (*found.model.parameters(), found.example.args[0])} == {"meta"}
    assert torch.empty(1).device.type == "cpu"


def test_a_function_that_needs_data_cannot_run_on_the_meta_device(tmp_path: Path) -> None:
    file = write(tmp_path / "data_to_load.py", "import torch\n\ndef build(): return torch.ones(1).item()\n")
    with pytest.raises(GraphPPError, match=r"build, run under torch\.device\('meta'\), raised RuntimeError"):
        load_model(f"{file}:build", meta=True)


def test_a_module_is_looked_for_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_to_load"
    package.mkdir()
    write(package / "neighbour.py", "WIDTH = 4")
    write(package / "models.py", f"{CODE}\n    from package_to_load.neighbour import WIDTH\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert load_model("package_to_load.models:build").loss is torch.nn.functional.mse_loss


def test_a_file_may_import_its_neighbours_and_have_the_name_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "neighbour_to_load.py", "WIDTH = 4")
    json = write(tmp_path / "json.py", "from neighbour_to_load import WIDTH\n" + "def build(): return 3")
    with pytest.raises(GraphPPError, match=r"json\.py:build returned 3"):
        load_model(f"{json}:build")
    import json as library

    assert hasattr(library, "dumps")


WRONG = {
    "raises": r"models_to_load\.py:raises raised ValueError: no data\n  at .*models_to_load\.py:\d+",
    "number": r"returned 7: return \(model, loss, example\), or an object with",
    "pair": "returned a tuple of 2",
    "alone": "returned a Linear alone",
    "class_for_model": r"the model must be an nn\.Module, got the class Linear",
    "number_for_loss": r"the loss must be a function of \(output, target\), or None, got 3",
    "tensor_for_example": r"the example must be a graphpp\.Microbatch\(args, kwargs, target\), got a tensor \[2, 4\]",
    "needs": "must take no arguments: missing a required argument: 'x'",
    "model": "is a Linear: name a function",
    "nothing": "has no nothing; its functions: example, build",
    "": "take package.module:function",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_by_name(file: str, name: str) -> None:
    with pytest.raises(GraphPPError, match=WRONG[name]) as caught:
        load_model(f"{file}:{name}")
    assert file in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.py:build", r"there is no file nothing\.py"),
        ("nothing_such:build", "there is no module 'nothing_such'"),
        ("nothing", "got 'nothing', and there is no such file or folder"),
        ("models.txt", r"name a function of the file too: models\.txt:FUNCTION"),
        ("./models.txt:build", r"models\.txt is no file of Python code"),
        ("broken.py:build", r"importing broken\.py raised NameError: .*\n  at .*broken\.py:1"),
        ("wrong.py:build", "importing wrong.py raised SyntaxError"),
        (".", "the folder . has no config.json"),
        ("", "take package.module:function"),
    ],
)
def test_names_of_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    for file, code in {"models.txt": "a", "broken.py": "undefined", "wrong.py": "def ("}.items():
        write(tmp_path / file, code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(GraphPPError, match=said):
        load_model(name)
    assert name.partition(".")[0] not in sys.modules


def test_rows_and_length_are_for_random_tokens(file: str) -> None:
    for option in ({"rows": 3}, {"length": 3}):
        with pytest.raises(GraphPPError, match=r"models_to_load\.py:build gives an example of its own"):
            load_model(f"{file}:build", **option)
