"""Every ```python block of the documents runs: README.md, docs/ and examples/*.md.

`make test` runs the blocks of README.md, without Inductor, whose compilation takes most of their time, and the examples of the
reference, but for those that start processes or trainers. Every public name has an example there. The pages of docs/tutorials/
run in tests/tutorials.

The blocks of one file run in order, in one namespace and in an empty folder. A traceback shows the document's own line.
A picture that a block writes equals the picture of that name in docs/; `GOLDEN_UPDATE=1` writes the picture in docs/.
Files that a document names, and links to files and headings, exist. No page of docs/ has more than `MOST_WORDS` words.
`make docs` builds the site of these pages; the checks here need no further packages.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import graphpp
from tests.exhaustive import further

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
TEXTS = sorted({*DOCUMENTS, *ROOT.glob("*.md"), *ROOT.glob("benchmarks/**/*.md")})
PATHS = re.compile(r"(?<![\w/])((?:graphpp|tests|benchmarks|examples|docs)/[\w/.]*\w)")
SHORT = re.compile(r"`((?:\w+/)+\w+\.py)`")
LINKS = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
REFERENCE = sorted(ROOT.glob("docs/reference/*.md"))
COSTLY = {"errors", "integrations"}
MOST_WORDS = 1_500  # also of the pages as they are shown, in website/hooks.py
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
    [
        (ROOT / "README.md", "eager"),
        *((page, "eager") for page in REFERENCE if page.stem not in COSTLY),
        *further(*((each, "inductor") for each in DOCUMENTS if each.parent.name not in ("reference", "tutorials"))),
        *further(*((page, "eager") for page in REFERENCE if page.stem in COSTLY)),
    ],
    ids=lambda value: str(value.relative_to(ROOT)) if isinstance(value, Path) else value,
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning
def test_blocks_run(document: Path, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(document, {"__name__": "__main__"}, backend)
    if dist.is_initialized():  # by a trainer
        dist.destroy_process_group()
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
    text = FENCED.sub("", document.read_text())
    links = [(document.parent / path if path else document, anchor) for path, anchor in LINKS.findall(text)]
    named = {ROOT / path for path in PATHS.findall(text)} | {path for path, _ in links}
    if document.name.startswith("design"):  # its paths are below graphpp/, but for those of other folders
        named |= {ROOT / "graphpp" / path for path in SHORT.findall(text) if not (ROOT / path).exists()}
    assert sorted(str(path) for path in named if not path.exists()) == []
    assert [f"{path}#{anchor}" for path, anchor in links if anchor and anchor not in anchors(path)] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_documents_that_the_code_names_exist() -> None:
    named = {path for file in (ROOT / "graphpp").rglob("*.py") for path in re.findall(r"docs/[\w/]+\.md", file.read_text())}
    assert named and sorted(path for path in named if not (ROOT / path).exists()) == []


def test_no_page_is_long() -> None:
    counts = {page: len(re.findall(r"\S*\w\S*", page.read_text())) for page in DOCUMENTS if "docs" in page.parts}
    assert [str(page.relative_to(ROOT)) for page, count in counts.items() if count > MOST_WORDS] == []


def test_the_pages_of_the_site_are_those_of_the_folder() -> None:
    listed = re.findall(r"^ +- (?:.*: )?([\w/]+\.md)$", (ROOT / "website/mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def public_names() -> set[str]:
    """Every public name by its path; of an adapter the names that the documents import."""
    found = set()
    for name in graphpp.__all__:
        value = getattr(graphpp, name)
        own = getattr(value, "__all__", None) or [each for each, item in vars(value).items() if defined_in(value, each, item)]
        found |= {f"graphpp.{name}.{each}" for each in own} if isinstance(value, ModuleType) else {f"graphpp.{name}"}
    imports = re.findall(r"from (graphpp\.integrations\.\w+) import ([\w, ]+)", "".join(each.read_text() for each in DOCUMENTS))
    found |= {f"{home}.{name.partition(' as ')[0].strip()}" for home, names in imports for name in names.split(",")}
    return found - {"graphpp.schedules.stage_ids"}  # graphpp.stage_ids


def defined_in(module: Any, name: str, value: Any) -> bool:
    return not name.startswith("_") and inspect.getmodule(value) is module and not inspect.ismodule(value) and callable(value)


def test_every_public_name_has_an_example_in_the_reference() -> None:
    entries = [entry for page in REFERENCE for entry in re.split(r"^::: ", page.read_text(), flags=re.MULTILINE)[1:]]
    shown = {entry.split()[0] for entry in entries if BLOCK.search(entry) or "](../../examples/" in entry}
    assert public_names() - shown == set()
    members = {name for entry in entries for listed in re.findall(r"members: \[(.*)\]", entry) for name in listed.split(", ")}
    assert {name for name in dir(graphpp.Pipeline) if not name.startswith("_")} <= members


LOSS = re.compile(r"(?<=: loss )\S+")


def test_the_first_step_prints_what_the_page_shows(tmp_path: Path) -> None:
    """docs/start.md: the script in one process and in two, by the commands of the page. Both print the same digits; those of
    another processor may differ from the page's in the last places."""
    page = (ROOT / "docs/start.md").read_text()
    (tmp_path / "first.py").write_text(next(source for _, source in blocks(page) if source.startswith("# first.py\n")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launchers = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    shown = re.findall(r"^```console\n\$ (\w+) (.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [command for command, _, _ in shown] == list(launchers)
    losses = []
    for command, arguments, output in shown:
        line = [sys.executable, *launchers[command], *arguments.split()]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=300)
        assert LOSS.sub("", done.stdout) == LOSS.sub("", output)
        losses.append(LOSS.findall(done.stdout))
        assert list(map(float, losses[-1])) == pytest.approx(list(map(float, LOSS.findall(output))), rel=1e-6)
    assert losses[0] == losses[1]


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
