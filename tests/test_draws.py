"""Random tests draw the same examples in every run, whatever other tests have imported before them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st


def drawn() -> list[int]:
    """The numbers that a random test draws."""
    found: list[int] = []

    @given(st.integers(0, 10**6))
    def draw(number: int) -> None:
        found.append(number)

    draw()
    return found


def test_numbers_in_modules_that_are_loaded_later_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    folder = tmp_path.parent / "loaded"  # the name of this test's own folder begins like a test's, whose modules never count
    folder.mkdir()
    numbers = ", ".join(str(number) for number in range(7_000, 9_000))
    (folder / "loaded_later.py").write_text(f"NUMBERS = [{numbers}]\n")
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("loaded_later")
    assert drawn() == before
