"""Options as text, read into the forms of `graphpp.compile`."""

import pytest

from graphpp.cli.forms import read_bytes, read_memory, read_split
from graphpp.errors import GraphPPError
from graphpp.planner.megatron_layout import Layout


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (None, None),
        ("auto", "auto"),
        ("4", 4),
        ("layers.2", ["layers.2"]),
        ("layers.2, layers.4", ["layers.2", "layers.4"]),
        ("a,b;c", [["a", "b"], ["c"]]),
        ("Et|tL", Layout("Et|tL")),
    ],
)
def test_splits(text: str | None, form: object) -> None:
    assert read_split(text) == form


@pytest.mark.parametrize("text", ["a,,b", ",a", "", "a;", "Et|x"])
def test_wrong_splits(text: str) -> None:
    with pytest.raises(GraphPPError):
        read_split(text)


def test_memory() -> None:
    assert read_memory(None, None).recompute is None
    found = read_memory("0.5", "1KiB")
    assert found.recompute is not None
    assert (found.recompute.fraction, found.cap) == (0.5, 1024)
    full, named = read_memory("full", None).recompute, read_memory("a,b", None).recompute
    assert full is not None
    assert full.layers is None
    assert named is not None
    assert named.layers == ("a", "b")


@pytest.mark.parametrize(
    ("memory", "cap"), [("7", None), ("nan", None), ("a,,b", None), (None, "0"), (None, "-1"), (None, "many")]
)
def test_wrong_memory(memory: str | None, cap: str | None) -> None:
    with pytest.raises(GraphPPError):
        read_memory(memory, cap)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("100000", 100_000), ("512 MiB", 2**29), ("8gib", 2**33), ("1.5GB", 1_500_000_000), ("0.1KiB", 102), ("7B", 7)],
)
def test_bytes(text: str, count: int) -> None:
    assert read_bytes("--cap", text) == count


@pytest.mark.parametrize("text", ["", "-1", "1e9", "12parsecs", "1.2.3", "9" * 18 + "TiB", "9" * 40, "inf"])
def test_wrong_bytes(text: str) -> None:
    with pytest.raises(GraphPPError, match=r"^--cap: take "):
        read_bytes("--cap", text)
