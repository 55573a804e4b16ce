"""Every ```python block of the documents runs: README.md, docs/*.md and examples/*.md.

The blocks of one file run in order, in one namespace and in an empty folder. A traceback shows the document's own line.
A picture that a block writes is the one that stands under that name in docs/; `GOLDEN_UPDATE=1` writes it anew.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """Each block's source, and how many lines of the document stand before it."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(text)]


def run(document: Path, namespace: dict[str, Any]) -> None:
    """Run all blocks of a document in the namespace."""
    for lines_before, source in blocks(document.read_text()):
        exec(compile("\n" * lines_before + source, str(document), "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(document, {"__name__": "__main__"})
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
