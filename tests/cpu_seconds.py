"""CPU seconds of each folder of tests, printed with `--cpu-seconds N` and held to a budget with `--cpu-budget FILE`.

A test's seconds are those of its process, of the processes that it started and that have ended, and of its ranks
(`tests/distributed.py`), from set-up to tear-down. A folder is the one below tests/ that the test's file is in; imports and
collection belong to no folder. FILE has CPU seconds per folder, and those that `reference` took on the same machine: a budget
grows and falls with the speed of the machine. A folder fails that takes `MARGIN` times its budget and `SLACK` seconds.
`GOLDEN_UPDATE=1` writes FILE.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest
import torch

from tests.distributed import cpu_seconds

MARGIN = 1.5
SLACK = 5.0
REFERENCE = "reference"  # the key of the reference's seconds in FILE


def reference() -> float:
    """CPU seconds of a fixed amount of what the tests do: Python that makes small objects, and small tensor operations."""
    began, x = time.process_time(), torch.ones(64, 64)
    for count in range(20_000):
        x = (x @ x).tanh()
        str({number: [number] for number in range(count % 40)})
    return time.process_time() - began


def folder(nodeid: str) -> str:
    """`tests/pipeline` for each test below that folder, `tests` for the files at the root."""
    parts = nodeid.partition("::")[0].split("/")
    return "/".join(parts[:2] if len(parts) > 2 else parts[:1])


def per_folder(seconds: Mapping[str, float]) -> Counter[str]:
    found: Counter[str] = Counter()
    for nodeid, each in seconds.items():
        found[folder(nodeid)] += each
    return found


def over_budget(found: Mapping[str, float], budgets: Mapping[str, float], reference: float) -> list[str]:
    """A line for each folder of `found` that takes more than its budget, on a machine of that reference."""
    speed = reference / budgets[REFERENCE]
    return [
        f"{name}: {seconds:.0f} CPU s, its budget is {budgets.get(name, 0.0) * speed:.0f} on this machine: mark further cases "
        "of a kind exhaustive, or raise the budget and say for what"
        for name, seconds in sorted(found.items())
        if seconds > budgets.get(name, 0.0) * speed * MARGIN + SLACK
    ]


class CpuSeconds:
    """The plugin: each process notes the seconds in the reports of its tests, and the one that prints adds them up."""

    def __init__(self, costliest: int, budget: Path | None) -> None:
        self.costliest, self.budget = costliest, budget
        self.seconds: Counter[str] = Counter()
        self.last = 0.0
        self.faults: list[str] = []

    def pytest_runtestloop(self) -> None:
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield  # set-up, call and tear-down have one each
        now = cpu_seconds()
        report.user_properties.append(("cpu_seconds", now - self.last))
        self.last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_seconds":
                self.seconds[report.nodeid] += value

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.budget is None or hasattr(session.config, "workerinput"):
            return
        found, took = per_folder(self.seconds), reference()
        if os.environ.get("GOLDEN_UPDATE"):
            table = {name: round(each, 1) for name, each in [(REFERENCE, took), *sorted(found.items())]}
            self.budget.write_text(json.dumps(table, indent=2) + "\n")
        self.faults = over_budget(found, json.loads(self.budget.read_text()), took)
        if self.faults:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds")
        for name, each in per_folder(self.seconds).most_common():
            write(f"{each:8.1f} {name}")
        write(f"{sum(self.seconds.values()):8.1f} in all")
        for nodeid, each in self.seconds.most_common(self.costliest):
            write(f"{each:8.1f} {nodeid}")
        for fault in self.faults:
            write(fault, red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=int, metavar="N", help="print CPU seconds per folder, and the N costliest tests")
    parser.addoption("--cpu-budget", type=Path, metavar="FILE", help="fail if a folder takes more CPU seconds than FILE says")


def pytest_configure(config: pytest.Config) -> None:
    costliest, budget = config.getoption("--cpu-seconds"), config.getoption("--cpu-budget")
    if costliest is not None or budget is not None:
        config.pluginmanager.register(CpuSeconds(costliest or 0, budget))
