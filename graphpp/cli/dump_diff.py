"""Compare the files of two dumps of graphs (`debug=graphpp.Debug(dump=folder)`).

Contract
    in   two folders of the same depth: whole dumps, or `rank0/train` of each
    out  `DumpDiff`: the files that one folder alone has, and a unified diff for each file whose text differs. The times and
         the numbers of passes do not count: `09_cut_stage0_forward.py` is compared with `10_cut_stage0_forward.py`. Neither
         do the versions of torch and graphpp, which are compared once for all files.
    Raises `GraphPPError` for a folder that has no dump, and for a file that cannot be read.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphpp.cli.schedule_inputs import readable
from graphpp.errors import GraphPPError

_SUFFIXES = (".py", ".txt", ".json", ".csv")
_NUMBER = re.compile(r"(?:(?<=/)|^)[0-9]{2}_(?=[^/]*\.py$)")
_VERSIONS = re.compile(r"^versions  (torch .*)$", re.MULTILINE)
_UNSTABLE = (  # beginnings of lines: the head of a graph's file, and `passes.txt`
    (re.compile(r"^pass      (?:[0-9]{2}_)?(\S+), [0-9.]+ ms$", re.MULTILINE), r"pass      \1"),
    (re.compile(r"^run       python [0-9]{2}_", re.MULTILINE), "run       python "),
    (re.compile(r"^[0-9]{2}  (\S+) +[0-9.]+ ms", re.MULTILINE), r"\1"),
    (_VERSIONS, "versions"),
)


@dataclass(frozen=True)
class DumpDiff:
    """The differences of two dumps; files are named by their path within the folders, without the number of the pass.

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
    found = {name: _diff(files[0][name], files[1][name], context) for name in both}
    changed = {name: text for name, text in found.items() if text}
    alone = tuple(sorted(files[0].keys() - files[1].keys())), tuple(sorted(files[1].keys() - files[0].keys()))
    return DumpDiff((first, second), alone, changed, len(both) - len(changed), (_versions(files[0]), _versions(files[1])))


@dataclass(frozen=True)
class _File:
    path: Path
    text: str

    @property
    def stable(self) -> list[str]:
        """The lines without what may differ between two runs of one program."""
        text = self.text
        for pattern, replacement in _UNSTABLE:
            text = pattern.sub(replacement, text)
        return text.splitlines()


def _files(folder: Path) -> dict[str, _File]:
    """The files of a dump by their path within the folder, without the number of the pass where that names one file alone."""
    if not folder.is_dir():
        raise GraphPPError(f"{folder} is no folder")
    found = [path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()]
    if not any(path.name == "passes.txt" or re.match(r"[0-9]{2}_.*\.py$", path.name) for path in found):
        raise GraphPPError(f'{folder} has no dump of graphs: a step with debug="{folder}" or GRAPHPP_DUMP={folder} writes one')
    full = {path.relative_to(folder).as_posix(): path for path in found}
    times = Counter(_NUMBER.sub("", name) for name in full)
    short = {name: _NUMBER.sub("", name) for name in full}
    names = {name: short[name] if times[short[name]] == 1 else name for name in full}
    return {names[name]: _File(path, readable(path)) for name, path in full.items()}


def _versions(files: Mapping[str, _File]) -> tuple[str, ...]:
    return tuple(sorted({found for file in files.values() for found in _VERSIONS.findall(file.text)}))


def _diff(old: _File, new: _File, context: int) -> str:
    """The unified diff; empty for equal texts."""
    lines = difflib.unified_diff(old.stable, new.stable, str(old.path), str(new.path), n=context, lineterm="")
    return "\n".join(lines)
