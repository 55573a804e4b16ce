"""A fixture for tests that read captured graphs and are not about the capture: tests of one file share graphs."""

from collections.abc import Iterator

import pytest

from tests.training import capturing


@pytest.fixture
def shared_captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pipelines take a graph that an earlier test of the file captured in this process of an equal model, if there is one."""
    with capturing(request.node.path.stem):
        yield
