"""The cache folder: its entries, its limit, and the functions that show and empty it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import graphpp
from graphpp.cache.disk_cache import DiskCache, default_limit
from tests.distributed import run_ranks


def fill(cache: DiskCache, key: str, size: int, used: float) -> None:
    """An entry of `size` bytes beside its manifest, last used at `used`."""
    with cache.entry(key) as folder:
        (folder / "data").write_bytes(b"x" * size)
    os.utime(cache.root / key / "manifest.json", (used, used))


def keys(root: Path) -> list[str]:
    return [entry.key for entry in graphpp.cache.entries(root)]


def test_the_entries_used_longest_ago_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPP_CACHE_LIMIT", "3000")
    cache = DiskCache(tmp_path)
    for at, key in enumerate("abcd"):
        fill(cache, key, 500, 1000.0 + at)
    assert keys(tmp_path) == ["a", "b", "c", "d"]
    with cache.entry("a"):  # now the one used last
        pass
    fill(cache, "e", 1200, 2000.0)
    assert keys(tmp_path) == ["d", "e", "a"]
    with cache.entry("f") as folder:
        (folder / "data").write_bytes(b"x" * 5000)  # larger than the limit: it goes itself, last of all
    assert keys(tmp_path) == []


def test_tables_go_with_all_entries_and_files_of_others_stay(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.write("seconds.json", {"a": "1"})
    (tmp_path / "mine.json").write_text("{}")
    graphpp.cache.clear(tmp_path, keep=10**9)
    assert cache.read("seconds.json") == {"a": "1"}
    graphpp.cache.clear(tmp_path)
    assert cache.read("seconds.json") == {} and (tmp_path / "mine.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 200_000], ids=["empty", "cut", "list", "null", "nested"])
def test_a_table_that_cannot_be_read_is_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "seconds.json").write_text(text)
    assert DiskCache(tmp_path).read("seconds.json") == {}


def test_an_entry_that_is_open_stays(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    fill(cache, "a", 10, 1.0)
    fill(cache, "b", 10, 2.0)
    with cache.entry("a"):
        assert [entry.key for entry in graphpp.cache.clear(tmp_path)] == ["b"]
    assert keys(tmp_path) == ["a"]


def test_a_folder_is_shown_and_cleared(tmp_path: Path) -> None:
    for at, key in enumerate("ab"):
        fill(DiskCache(tmp_path), key, 100, 86400.0 * (at + 1))
    size = sum(entry.size for entry in graphpp.cache.entries(tmp_path))
    assert size > 200
    assert [entry.key for entry in graphpp.cache.clear(tmp_path, keep=size - 1)] == ["a"]
    assert keys(tmp_path) == ["b"]
    assert [entry.key for entry in graphpp.cache.clear(tmp_path)] == ["b"]
    assert graphpp.cache.entries(tmp_path / "missing") == graphpp.cache.clear(tmp_path / "missing") == []


@pytest.mark.parametrize("keep", [-1, 1.5, True, "all"])
def test_what_is_kept_is_a_number_of_bytes(keep: object, tmp_path: Path) -> None:
    with pytest.raises(graphpp.GraphPPError, match="keep: take a number of bytes"):
        graphpp.cache.clear(tmp_path, keep=keep)  # type: ignore[arg-type]


def test_the_limit_is_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_limit() == 10 * 2**30
    for limit in ("10 GB", "-1"):
        monkeypatch.setenv("GRAPHPP_CACHE_LIMIT", limit)
        with pytest.raises(graphpp.GraphPPError, match=f"GRAPHPP_CACHE_LIMIT is a number of bytes, 0 or more, got '{limit}'"):
            DiskCache(tmp_path)


def fill_and_shrink(rank: int, root: str) -> int:
    """Write many entries under a limit that holds only a few of them."""
    os.environ["GRAPHPP_CACHE_LIMIT"] = "5000"
    cache = DiskCache(Path(root))
    for turn in range(20):
        with cache.entry(f"{turn % 7}") as folder:
            (folder / "data").write_bytes(bytes([rank]) * (500 + turn))
    return sum(entry.size for entry in cache.entries())


def test_two_processes_keep_to_one_limit(tmp_path: Path) -> None:
    run_ranks(fill_and_shrink, 2, str(tmp_path))
    DiskCache(tmp_path).shrink(5000)
    assert 0 < sum(entry.size for entry in graphpp.cache.entries(tmp_path)) <= 5000


def test_what_others_may_have_written_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, kept = tmp_path / "cache", tmp_path / "kept"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    assert DiskCache(root).root != root
    assert f"other users may write to {root}" in caplog.text and "set GRAPHPP_CACHE to a folder that you own" in caplog.text
    cache = DiskCache(kept)
    fill(cache, "a", 10, 1000.0)
    with cache.entry("a") as folder:
        assert (folder / "data").exists()
    (kept / "a" / "data").chmod(0o666)
    with cache.entry("a") as folder:
        assert not (folder / "data").exists()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files to another user")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(tmp_path, 12345, -1)
    assert DiskCache(tmp_path).root != tmp_path
    assert "belongs to the user 12345" in caplog.text
