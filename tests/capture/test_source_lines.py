"""Frames of torch, graphpp and Python are told apart from the user's own."""

import json

import pytest
import torch

from graphpp.capture import source_lines
from graphpp.capture.source_lines import is_user_file
from graphpp.passes import lower


@pytest.mark.parametrize("file", [source_lines.__file__, lower.__file__, torch.__file__, json.__file__, "<string>"])
def test_files_of_the_machinery_are_not_the_users(file: str) -> None:
    assert not is_user_file(str(file))


@pytest.mark.parametrize("file", [__file__, pytest.__file__])
def test_tests_and_installed_packages_are_the_users(file: str) -> None:
    assert is_user_file(str(file))
