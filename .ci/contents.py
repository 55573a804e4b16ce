"""Compare a wheel and an sdist with the tree that they were built from. Arguments: the wheel, the sdist.

The wheel holds exactly the files of `graphpp/` and its metadata with the license. The sdist holds the same files and the files
of the other folders and of the root that a user needs to run the tests. Neither holds the root links `passes` and `runtime`.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "tests", "website")
FILES = (
    "CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
    "README.pypi.md", "SECURITY.md", "pyproject.toml",
)  # fmt: skip

ECHARTS = ("LICENSE", "LICENSE-d3", "LICENSE-zrender", "NOTICE")


def tree(*folders: str) -> set[str]:
    """The files below these folders, by their paths in the repository; no compiled Python."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def check_wheel(wheel: str) -> int:
    """Raise AssertionError where the wheel is not the package alone; return its number of files."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    relative = re.findall(r"\]\((?!https://)[^)]*\)", metadata)
    assert not relative, f"the page on the package index has links that lead nowhere: {relative}"
    code = {name for name in names if ".dist-info/" not in name}
    assert code == tree("graphpp"), f"the wheel and graphpp/ differ by {sorted(code ^ tree('graphpp'))}"
    assert "graphpp/py.typed" in code, "the wheel lacks graphpp/py.typed"
    for name in ("LICENSE", *(f"graphpp/report/assets/echarts/{each}" for each in ECHARTS)):
        assert any(each.endswith(f".dist-info/licenses/{name}") for each in names), f"the wheel lacks the license {name}"
    return len(names)


def check_sdist(sdist: str) -> int:
    """Raise AssertionError where the sdist lacks a file of the tree, or holds a root link; return its number of files."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = (tree("graphpp", *FOLDERS) | set(FILES)) - names
    assert not missing, f"the sdist lacks {sorted(missing)}"
    links = sorted(name for name in names if re.match(r"(passes|runtime)(/|$)", name))
    assert not links, f"the sdist holds the root links: {links}"
    return len(names)


def main() -> None:
    wheel, sdist = sys.argv[1:]
    print(f"{Path(wheel).name}: {check_wheel(wheel)} files, nothing beside graphpp")
    print(f"{Path(sdist).name}: {check_sdist(sdist)} files")


if __name__ == "__main__":
    main()
