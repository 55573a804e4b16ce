"""Installed packages and their versions, and code that belongs to no package."""

import sys

import numpy as np
import pytest
import torch
import yaml

from graphpp.capture.transfer.libraries import is_installed, top_package, version


@pytest.mark.parametrize(
    ("root", "expected"),
    [("torch", torch.__version__), ("numpy", np.__version__), ("yaml", yaml.__version__), ("json", sys.version)],
)
def test_a_package_has_the_version_of_its_distribution_or_its_own(root: str, expected: str) -> None:
    assert version(root).partition("+")[0] == expected.partition("+")[0]


def test_a_package_without_a_version_is_unknown() -> None:
    assert version("no_such_package") == "unknown"


@pytest.mark.parametrize("value", [torch.nn.Linear, torch, pytest.fixture, top_package])
def test_installed_code_is_told_from_the_users(value: object) -> None:
    assert is_installed(top_package(value))
    assert not is_installed("tests")
