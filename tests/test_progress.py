"""Work that takes long is shown: as a bar on a terminal, as lines in the log elsewhere."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import time

import pytest

from graphpp import progress

_ON_A_TERMINAL = """
import importlib.util, time
spec = importlib.util.spec_from_file_location("progress", {path!r})  # without the package, which would load torch
progress = importlib.util.module_from_spec(spec)
spec.loader.exec_module(progress)
progress._PATIENCE = 0.05
with progress.working("moving stones", 3) as step:
    for _ in range(3):
        time.sleep(0.2)
        step()
print("done")
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.01)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "graphpp.progress"]


def _wait_for(caplog: pytest.LogCaptureFixture, count: int) -> None:
    until = time.monotonic() + 100
    while len(_lines(caplog)) < count and time.monotonic() < until:
        time.sleep(0.01)


def test_short_work_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphpp")
    with progress.working("moving stones"):
        pass
    assert _lines(caplog) == []


@pytest.mark.usefixtures("impatient")
def test_long_work_leaves_a_line_at_its_beginning_and_one_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphpp")
    with progress.working("moving stones", 2) as step:
        step()
        _wait_for(caplog, 1)
    first, last = _lines(caplog)
    assert first in ("moving stones: 0 of 2", "moving stones: 1 of 2") and last.startswith("moving stones: ended after ")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_ends_the_work(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphpp")
    with pytest.raises(error), progress.working("moving stones"):
        _wait_for(caplog, 1)
        raise error
    assert len(_lines(caplog)) == 2


def _shown(rank: str) -> str:
    """All that a process writes whose standard error is a terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "RANK": rank, "TERM": "xterm"}
    program = _ON_A_TERMINAL.format(path=progress.__file__)
    with subprocess.Popen([sys.executable, "-c", program], stderr=slave, stdout=slave, env=environment) as process:
        assert process.wait(300) == 0
    os.close(slave)
    text = b""
    try:
        while chunk := os.read(master, 65536):
            text += chunk
    except OSError:  # the end of a terminal whose writer has gone
        pass
    finally:
        os.close(master)
    return text.decode()


def test_the_first_rank_draws_a_bar_and_takes_it_away() -> None:
    text = _shown("0")
    assert "moving stones" in text and "/3" in text
    assert "\x1b[2K" in text.rpartition("moving stones")[2], "the last bar is not erased"
    assert text.rstrip().endswith("done")
