"""Compare the files of two dumps of graphs (`debug=graphpp.Debug(dump=folder)`).

Contract
    in   two folders of the same depth: whole dumps, or `rank0/train` of each
    out  `DumpDiff`: the files that one folder alone has, and a unified diff for each file whose text differs. The times of
         passes do not count, and neither do the versions of torch and graphpp, which are compared once for all files.
    Raises `GraphPPError` for a folder that has no dump, and for a file that cannot be read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphpp.cli.schedule_inputs import readable
from graphpp.errors import GraphPPError

_SUFFIXES = (".py", ".txt", ".json", ".csv")
_TIME = re.compile(r"^(pass      \S+, |[0-9]{2}  \S+ +)[0-9.]+ ms", re.MULTILINE)
_VERSIONS = re.compile(r"^versions  (torch .*)$", re.MULTILINE)


@dataclass(frozen=True)
class DumpDiff:
    """The differences of two dumps; files are named by their path within the folders.

    `changed`: a unified diff by file. `equal`: how many files have equal texts. `versions`: of torch and graphpp, in each dump.
    """

    folders: tuple[Path, Path]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    changed: Mapping[str, str]
    equal: int
    versions: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def same(self) -> bool:
        """Whether both folders have the same files with equal texts."""
        return not (self.changed or any(self.alone))

    def __str__(self) -> str:
        lines = [f"only in {folder}: {file}" for folder, files in zip(self.folders, self.alone, strict=True) for file in files]
        lines += [f"differs: {file}" for file in self.changed]
        lines += ["", *self.changed.values()] if self.changed else []
        if self.versions[0] != self.versions[1]:
            made = [", ".join(each) or "unknown versions" for each in self.versions]
            lines.append(f"made by {made[0]}, and by {made[1]}")
        alone = sum(map(len, self.alone))
        return "\n".join([*lines, f"{self.equal} files equal, {len(self.changed)} differ, {alone} in one folder alone"])


def diff_dumps(first: Path, second: Path, context: int = 3) -> DumpDiff:
    """The differences of two dumps; a diff shows `context` lines around each change."""
    files = _files(first), _files(second)
    both = sorted(files[0].keys() & files[1].keys())
    texts = {name: (_stable(files[0][name]), _stable(files[1][name])) for name in both}
    changed = {
        name: _diff(name, (first, second), pair, context) for name, pair in texts.items() if pair[0] != pair[1]
    }
    alone = tuple(sorted(files[0].keys() - files[1].keys())), tuple(sorted(files[1].keys() - files[0].keys()))
    return DumpDiff((first, second), alone, changed, len(both) - len(changed), (_versions(files[0]), _versions(files[1])))


def _files(folder: Path) -> dict[str, str]:
    """The text of each file of a dump by its path within the folder."""
    if not folder.is_dir():
        raise GraphPPError(f"{folder} is no folder")
    found = [path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()]
    if not any(path.name == "passes.txt" or re.match(r"[0-9]{2}_.*\.py$", path.name) for path in found):
        raise GraphPPError(f'{folder} has no dump of graphs: a step with debug="{folder}" or GRAPHPP_DUMP={folder} writes one')
    return {path.relative_to(folder).as_posix(): readable(path) for path in found}


def _stable(text: str) -> str:
    return _VERSIONS.sub("versions", _TIME.sub(r"\1", text))


def _versions(files: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted({found for text in files.values() for found in _VERSIONS.findall(text)}))


def _diff(name: str, folders: tuple[Path, Path], texts: tuple[str, str], context: int) -> str:
    before, after = (text.splitlines() for text in texts)
    old, new = (str(folder / name) for folder in folders)
    return "\n".join(difflib.unified_diff(before, after, old, new, n=context, lineterm=""))
