"""The tree of loggers: a logger for each module, the rank in each record, torch's own switch."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from graphpp.log import logger

SAYS = "import graphpp.log as log, torch; [log.logger(f'graphpp.{each}').info(f'of {each}') for each in ('capture', 'runtime')]"


@pytest.mark.parametrize(("variable", "rank"), [("3", 3), ("", None)])
def test_a_record_has_the_rank(
    variable: str, rank: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", variable)
    logger("graphpp.example").warning("said")
    (record,) = caplog.records
    assert record.name == "graphpp.example" and record.rank == rank


def test_a_rank_of_the_programs_own_record_factory_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ranked(logging.LogRecord):
        rank = property(lambda self: "mine", lambda self, value: None)

    monkeypatch.setattr(logging, "_logRecordFactory", Ranked)
    logger("graphpp.example").warning("said")
    assert [record.rank for record in caplog.records] == ["mine"]


def test_every_logger_is_that_of_its_module() -> None:
    named = {path: path.read_text() for path in Path("graphpp").rglob("*.py") if path.name != "log.py"}
    assert [path for path, text in named.items() if "getLogger(" in text and 'getLogger("torch.' not in text] == [
        Path("graphpp/capture/eager_branches.py")  # torch's own logger
    ]
    assert sum("logger(__name__)" in text for text in named.values()) > 10


def test_torch_logs_sets_the_level_of_one_package() -> None:
    environment = {"PATH": "", "TORCH_LOGS": "graphpp.capture", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=True)
    assert "of capture" in done.stderr and "of runtime" not in done.stderr
