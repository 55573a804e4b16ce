"""Every ```python block of the documents runs: README.md, docs/*.md and examples/*.md.

`make test` runs the blocks of README.md alone, without Inductor, whose compilation takes most of their time.

The blocks of one file run in order, in one namespace and in an empty folder. A traceback shows the document's own line.
A picture that a block writes equals the picture of that name in docs/; `GOLDEN_UPDATE=1` writes the picture in docs/.
Files that a document names, and links to files, exist.
"""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

import graphpp
from tests.exhaustive import further

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
TEXTS = sorted({*DOCUMENTS, *ROOT.glob("*.md"), *ROOT.glob("benchmarks/**/*.md")})
PATHS = re.compile(r"(?<![\w/])((?:graphpp|tests|benchmarks|examples|docs)/[\w/.]*\w)")
SHORT = re.compile(r"`((?:\w+/)+\w+\.py)`")
LINKS = re.compile(r"\]\((?!https?:)([^)#\s]+)")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """Each block's source, and the number of lines of the document before it."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(text)]


def run(document: Path, namespace: dict[str, Any], backend: str = "inductor") -> None:
    """Run all blocks of a document in the namespace, with `backend` in place of Inductor."""
    for lines_before, source in blocks(document.read_text().replace('backend="inductor"', f'backend="{backend}"')):
        exec(compile("\n" * lines_before + source, str(document), "exec"), namespace)


@pytest.mark.parametrize(
    ("document", "backend"),
    [(ROOT / "README.md", "eager"), *further(*((document, "inductor") for document in DOCUMENTS))],
    ids=lambda value: str(value.relative_to(ROOT)) if isinstance(value, Path) else value,
)
def test_blocks_run(document: Path, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(document, {"__name__": "__main__"}, backend)
    for picture in tmp_path.glob("*.svg"):
        shown = ROOT / "docs" / picture.name
        if os.environ.get("GOLDEN_UPDATE"):
            shown.write_text(picture.read_text())
        assert picture.read_text() == shown.read_text(), f"{shown.name}: see GOLDEN_UPDATE at the head of this test"


def test_blocks_share_a_namespace_and_keep_their_lines(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("text\n```python\nx = 1\n```\n```bash\nfalse\n```\n```python\ny = x + 1\n1 / 0\n```\n")
    namespace: dict[str, Any] = {}
    with pytest.raises(ZeroDivisionError) as caught:
        run(document, namespace)
    assert namespace["y"] == 2
    assert caught.traceback[-1].lineno + 1 == 10


def test_readme_has_blocks() -> None:
    assert blocks((ROOT / "README.md").read_text())


@pytest.mark.parametrize("document", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {ROOT / path for path in PATHS.findall(text)} | {document.parent / path for path in LINKS.findall(text)}
    if document.name.startswith("design"):  # its paths are below graphpp/, but for those of other folders
        named |= {ROOT / "graphpp" / path for path in SHORT.findall(text) if not (ROOT / path).exists()}
    assert sorted(str(path) for path in named if not path.exists()) == []


def test_the_table_of_the_pipeline_has_all_its_methods_with_their_arguments() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/pipeline.md").read_text(), re.MULTILINE)
    calls = [call for row in rows for call in re.findall(r"`([^`]*)`", row) if call != "print(pipe)"]
    public = {name: getattr(graphpp.Pipeline, name) for name in dir(graphpp.Pipeline) if not name.startswith("_")}

    def call(name: str, method: Any) -> str:
        if not callable(method):
            return name
        given = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
        marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        return f"{name}({', '.join(marks.get(each.kind, '') + each.name for each in given)})"

    assert sorted(calls) == sorted(call(name, method) for name, method in public.items())


def test_the_changelog_has_the_version() -> None:
    assert f"\n## {graphpp.__version__} " in (ROOT / "CHANGELOG.md").read_text()
