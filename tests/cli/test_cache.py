"""`graphpp cache`: the entries, their size, and emptying."""

from pathlib import Path

import pytest

import graphpp
from graphpp.cache.disk_cache import DiskCache
from tests.cli.running import document, refusal, run


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    made = DiskCache(tmp_path / "cache")
    for key in "abc":
        with made.entry(key) as folder:
            (folder / "data").write_bytes(b"x" * 1000)
    return made.root


def test_the_entries_are_listed(cache: Path) -> None:
    listed = run("cache", "list", "--folder", cache).stdout.splitlines()
    assert [line[-1] for line in listed[:-1]] == ["a", "b", "c"] and listed[-1].startswith(f"{cache}: 3 entries, ")
    assert [entry["key"] for entry in document("cache", "list", "--folder", cache)["entries"]] == ["a", "b", "c"]


def test_the_folder_of_the_variable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPP_CACHE", str(cache))
    assert len(document("cache", "list")["entries"]) == 3
    monkeypatch.setenv("GRAPHPP_CACHE", str(cache / "none"))
    assert document("cache", "list") == {"folder": str(cache / "none"), "bytes": 0, "removed": False, "entries": []}


def test_emptying(cache: Path) -> None:
    removed = document("cache", "empty", "--folder", cache, "--keep", "2.5KiB")
    assert [entry["key"] for entry in removed["entries"]] == ["a"]
    assert removed["removed"]
    assert "1 entry," in run("cache", "empty", "--folder", cache, "--keep", "1500").stdout
    assert run("cache", "empty", "--folder", cache).stdout.endswith("removed\n")
    assert graphpp.cache.entries(cache) == []


def test_a_folder_that_is_no_cache_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    assert "is no cache of graphpp" in refusal("cache", "empty", "--folder", tmp_path)
    assert (tmp_path / "thesis" / "text").read_text() == "mine"
    assert "is no folder" in refusal("cache", "list", "--folder", tmp_path / "thesis" / "text")
    assert "--keep: take a number of bytes" in refusal("cache", "empty", "--keep", "lots")
