"""`graphpp plan`: plans for machines that are not here, their document and their file."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphpp
from tests.cli.running import document, refusal, run, write

CODE = """
    import torch
    from torch import nn

    import graphpp

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def build():
        model = nn.Sequential(nn.Embedding(16, 32), *(Layer() for _ in range(4)), nn.Linear(32, 16))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        loss = lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        return model, loss, graphpp.Microbatch((tokens,), target=tokens)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "model_to_plan.py", CODE)) + ":build"


def test_plans_are_printed_with_the_best_in_full(model: str) -> None:
    found = run("plan", model, "--machines", "2xH100", "--batch", "8")
    assert found.exit_code == 0
    assert "best" in found.stdout and "tokens/s, MFU" in found.stdout and "memory" in found.stdout


def test_the_document_has_the_plans_and_the_file_the_best(model: str, tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    found = document("plan", model, "--machines", "2xH100", "--batch", "8", "--pp", "2", "--save", str(file))
    best = graphpp.TrainingPlan.from_json(file)
    assert found["plans"][0]["setting"]["shape"]["pp"] == 2
    assert len(found["plans"]) > 1 and found["considered"] >= len(found["plans"])
    assert best.reason == "" and best.setting.shape.pp == 2 and best.batch == 8


def test_the_front_is_printed_in_full(model: str) -> None:
    found = run("plan", model, "--machines", "2xH100", "--batch", "8", "--front", "--schedules", "auto,1F1B", "--pp", "1,2")
    assert found.exit_code == 0 and found.stdout.count("memory ") == found.stdout.count("stages start at")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machines", "2xToaster", "--batch", "8"], "devices are"),
        (["--machines", "2xH100", "--batch", "8", "--pp", "two"], "--pp: take a positive number"),
        (["--machines", "2xH100", "--batch", "8", "--dtype", "int8"], "--dtype: take the name of a floating dtype"),
        (["--machines", "2xH100", "--batch", "8", "--cap", "1KiB"], "no plan fits; the closest"),
        (["--machines", "2xH100", "--batch", "8", "--schedules", "1F2B"], "schedules: take a list of names"),
        (["--machines", "2xH100", "--batch", "8", "--save", "/nowhere/at/all.json"], "--save: "),
    ],
)
def test_wrong_options_are_named(model: str, options: list[str], message: str) -> None:
    assert message in refusal("plan", model, *options)
