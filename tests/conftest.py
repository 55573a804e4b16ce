"""What holds in every test: one thread, fixed seeds, fast captures, no worker left behind."""

import gc
import importlib
import logging
import os
import random
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.entropy import deterministic_PRNG

from tests.distributed import COLLECTED, PRELOADED, close_workers
from tests.exhaustive import examples, mark_further_cases
from tests.quick import QUICK

pytest_plugins = ["tests.cpu_seconds"]
os.environ["HF_HUB_OFFLINE"] = "1"  # tests build their models from configurations and load nothing
os.environ.setdefault("GRAPHPP_CACHE", tempfile.mkdtemp(prefix="graphpp-tests-"))  # not the user's own
torch.set_num_threads(1)
if "PYTEST_XDIST_WORKER" in os.environ:  # a process that runs many tests and would walk over its modules in each collection
    for name in PRELOADED:
        importlib.import_module(name)
with deterministic_PRNG():  # Hypothesis looks for referrers of its own generator, and finds none that are frozen
    gc.collect()
gc.freeze()  # before tests are imported, whose own objects captures search
gc.set_threshold(*COLLECTED)
# Random tests draw the same in every run, however busy the machine is. Hypothesis would also draw the numbers that it finds in
# the modules loaded so far: by other tests, in another order in each run.
providers.is_local_module_file = lambda path: False
settings.register_profile(
    "graphpp",
    deadline=None,
    derandomize=True,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("graphpp")


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def workers() -> Iterator[None]:
    """The processes of `run_ranks` end with the session."""
    yield
    close_workers()


def pytest_configure(config: pytest.Config) -> None:
    """A test that is named by its id runs, also if it is exhaustive."""
    if config.option.markexpr == "not exhaustive" and any("::" in argument for argument in config.args):
        config.option.markexpr = ""


def _without_structured_trace() -> Iterator[None]:
    """pytest listens to loggers that do not propagate; torch takes that for the wish for a trace, and graphpp writes its dump.

    pytest adds its handlers anew for the set-up and for the call of each test, in hooks that this one runs within.
    """
    trace = logging.getLogger("torch.__trace")
    handlers, trace.handlers = trace.handlers, []
    try:
        return (yield)
    finally:
        trace.handlers = handlers


pytest_runtest_setup = pytest_runtest_call = pytest.hookimpl(wrapper=True, trylast=True)(_without_structured_trace)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a failure to the file that GRAPHPP_TEST_FAILURES names as soon as the test fails: a run may be cut off."""
    if report.failed and (name := os.environ.get("GRAPHPP_TEST_FAILURES")) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(name, "a") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves tests out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests and further cases; skip the tests that need a GPU where there is none."""
    mark_further_cases(items)
    for item in items:
        if item.nodeid.startswith(QUICK):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
