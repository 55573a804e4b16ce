"""The floors of the house, checked on the source text: who may import whom, and where torch's private names may be.

`tests/house.py` has the table of packages, from the lowest floor to the highest, and reads the imports. `schedules` knows no
torch, `runtime` no `torch.fx`, `passes` no `torch.distributed` and no schedules. Private names of torch stand in
`graphpp/_torch/`, whose files list each of them in their docstrings with the versions of torch on which the names were checked.
Nothing is imported relatively or through the root links `passes` and `runtime`. No folder has more than 16 Python files, no
imports form a circle, and no package has more lines than its ceiling.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import house
from tests.quick import QUICK

ROOT = Path(__file__).parents[1]
FOLDERS = ("graphpp", "tests", "benchmarks", "examples")
UNKNOWN = {  # folder -> a package that its files must not import
    "graphpp/schedules": "torch",
    "graphpp/report": "torch",
    "graphpp/passes": "torch.distributed",
    "graphpp/runtime": "torch.fx",
}
PRIVATE_FOLDER = "graphpp/_torch/"
MOST_FILES_OF_A_FOLDER = 16


@dataclass(frozen=True)
class Name:
    """A dotted name that a file reaches through its imports, for example `torch.fx.Graph`."""

    path: str
    line: int
    by_import: bool  # named in an import statement, not only as an attribute

    def within(self, *prefixes: str) -> bool:
        return any(f"{self.path}.".startswith(f"{prefix}.") for prefix in prefixes)

    @property
    def private(self) -> bool:
        """A name of torch in which any part starts with one underscore; operators are what graphs are made of."""
        if not self.within("torch") or self.within("torch.ops"):
            return False
        return any(re.match(r"_(?!_)", part) for part in self.path.split("."))


def names(source: str) -> list[Name]:
    """Every dotted name that starts at an import: the imports themselves, and attributes of what they bind."""
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {alias: path for node in statements for alias, path in bindings(node)}
    imported = [Name(path, node.lineno, True) for node in statements for path in paths(node)]
    return imported + list(attributes(tree, bound))


def paths(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What an import statement names: `from a import b` is `a.b`; a relative import starts with dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = "." * node.level + (node.module or "")
    return [f"{module}.{alias.name}" for alias in node.names]


def bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Pairs of a local name and the dotted path that it stands for."""
    for alias, path in zip(node.names, paths(node), strict=True):
        if alias.asname or isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, path
        else:
            top = alias.name.split(".")[0]
            yield top, top


def attributes(tree: ast.AST, bound: dict[str, str]) -> Iterator[Name]:
    """Whole chains such as `fx.graph.Graph` whose root is an imported name, as full paths."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in found}
    for node in found:
        chain = ast.unparse(node)
        root, _, rest = chain.partition(".")
        if id(node) not in inner and root in bound and re.fullmatch(r"[\w.]+", chain):
            yield Name(f"{bound[root]}.{rest}", node.lineno, False)


def faults(file: str, source: str) -> list[str]:
    """What a file does against the floors, one line each; `file` is its path in the repository."""
    found = names(source)
    return [
        f"{file}:{name.line}: {name.path}: {why}"
        for name in sorted(found, key=lambda name: (name.line, name.path))
        for why in [fault(file, name)]
        if why
    ] + unlisted(file, source, found)


def fault(file: str, name: Name) -> str | None:
    """Why a file may not use a name; None if it may."""
    if name.by_import and name.path.startswith("."):
        return "import absolutely"
    if name.by_import and name.within("passes", "runtime"):
        return "the root links are for readers, import graphpp.passes or graphpp.runtime"
    if name.private and file.startswith("graphpp/") and not file.startswith(PRIVATE_FOLDER):
        return f"private names of torch belong in {PRIVATE_FOLDER}"
    if name.by_import and name.within("graphpp") and file.startswith("graphpp/"):
        return floor_fault(module_of(file), name.path)
    unknown = (UNKNOWN[folder] for folder in UNKNOWN if file.startswith(f"{folder}/"))
    return next((f"this package knows no {each}" for each in unknown if name.within(each)), None)


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def floor_fault(module: str, target: str) -> str | None:
    """Why a module may not import a name of graphpp; None if it may."""
    if house.allowed(house.Arrow(module, target, 0)):
        return None
    floor = house.floor(module)
    return f"{module} stands below it" if floor is None else f"{floor} imports only {', '.join(house.MAY_IMPORT[floor])}"


def unlisted(file: str, source: str, found: list[Name]) -> list[str]:
    """Private names, and versions of torch, that the docstring of a file in `graphpp/_torch/` lacks."""
    if not file.startswith(PRIVATE_FOLDER) or file.endswith("__init__.py"):
        return []
    docstring = ast.get_docstring(ast.parse(source)) or ""
    private = {name.path for name in found if name.private}
    outermost = {path for path in private if not any(f"{path}.".startswith(f"{other}.") for other in private - {path})}
    missing = sorted(path for path in outermost if not re.search(rf"(?<!\w){last(path)}(?!\w)", docstring))
    lines = [f"{file}: {path}: private, and not listed in the docstring" for path in missing]
    if not re.search(r"\b2\.1[1-5]\b", docstring):
        lines.append(f"{file}: the docstring does not say on which versions of torch its names were checked")
    return lines


def last(path: str) -> str:
    return re.escape(path.rsplit(".", 1)[-1])


# ------------------------------------------------------------------------------------------------------------- tests

FILES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_file_keeps_to_its_floor(file: str) -> None:
    assert faults(file, (ROOT / file).read_text()) == []


def test_no_folder_is_a_long_street() -> None:
    counts = house.files_per_folder(ROOT)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES_OF_A_FOLDER} == {}


def test_no_package_is_above_its_ceiling() -> None:
    found, allowed = house.lines(ROOT), house.CEILINGS
    assert found.keys() == allowed.keys(), "CEILINGS of tests/house.py names every package"
    above = {folder: f"{count} lines, {allowed[folder]} allowed" for folder, count in found.items() if count > allowed[folder]}
    assert above == {}, "lower another ceiling of tests/house.py, or say in docs/design.md which user needs the lines"


def test_graphpp_has_no_more_files_than_its_ceiling() -> None:
    assert len(house.modules(ROOT)) <= house.MOST_FILES, "merge small files that share one idea"


def test_no_imports_form_a_circle() -> None:
    assert house.circles(ROOT) == []


def test_every_folder_has_a_floor() -> None:
    packages = [name for name, path in house.modules(ROOT).items() if path.name == "__init__.py" and name != "graphpp"]
    high = [name for name in house.HIGH if name != "graphpp"]
    assert [name for name in packages if house.floor(name) is None and not any(house.within(name, each) for each in high)] == []


_UNTESTED = ("graphpp", "_torch", "integrations")  # `_torch` is under all of them; trainers take seconds to load


def test_make_quick_touches_every_package() -> None:
    packages = {name.removeprefix("graphpp.") for name, path in house.modules(ROOT).items() if path.name == "__init__.py"}
    tested = {".".join(Path(each.partition("::")[0]).parts[1:-1]) for each in QUICK}
    outer = {name for name in packages if name not in _UNTESTED and "." not in name}
    assert {name.partition(".")[0] for name in tested} >= outer
    assert tested >= {name for name in packages if name.startswith(("schedules.", "passes."))}
    assert all((ROOT / each.partition("::")[0]).exists() for each in QUICK)


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="a source distribution has no links")
@pytest.mark.parametrize("link", ["passes", "runtime"])
def test_root_links_show_the_real_folders(link: str) -> None:
    assert (ROOT / link).is_symlink()
    assert (ROOT / link).resolve() == ROOT / "graphpp" / link


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        ("graphpp/passes/a.py", "from graphpp.capture.trace import trace", "graphpp.capture.trace.trace"),
        ("graphpp/passes/a.py", "def f():\n    import torch.distributed as dist", "a.py:2: torch.distributed"),
        ("graphpp/passes/a.py", "import torch\nx = torch.distributed.get_rank()", "a.py:2: torch.distributed"),
        ("graphpp/runtime/a.py", "from torch import fx", "torch.fx"),
        ("graphpp/runtime/a.py", "import graphpp.passes.stage.cut_stages", "graphpp.passes.stage.cut_stages"),
        ("graphpp/runtime/a.py", "from . import actions", "import absolutely"),
        ("graphpp/api.py", "import torch._dynamo", "private"),
        ("graphpp/api.py", "from torch._export import utils", "private"),
        ("graphpp/api.py", "from torch.distributed.pipelining import schedules as s\ns._Action", "schedules._Action"),
        ("graphpp/api.py", "import torch\ntorch._check(True)", "torch._check"),
        ("tests/a.py", "from passes import cut", "root links"),
        ("benchmarks/a.py", "import runtime.actions", "root links"),
        ("graphpp/_torch/aot.py", '"""2.13: `_a`, `__b`."""\nfrom torch.x import _a, _b', "torch.x._b"),
        ("graphpp/_torch/aot.py", '"""Lists _a."""\nfrom torch.x import _a', "versions"),
    ],
)
def test_a_fault_is_found(file: str, source: str, why: str) -> None:
    (line,) = faults(file, source)
    assert why in line


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("graphpp/passes/a.py", "from graphpp.runtime.program import StageProgram\nimport torch.fx, networkx"),
        ("graphpp/runtime/a.py", "from graphpp import errors\nimport torch.distributed as dist\ndist.get_rank()"),
        ("graphpp/api.py", "from graphpp.passes import lower\nimport torch\nprint(torch.__version__)"),
        ("graphpp/pipeline/a.py", "from graphpp.verification import verify\nfrom graphpp.schedules.table import actions"),
        ("graphpp/schedules/check/a.py", "from graphpp.schedules.table import actions\nfrom graphpp import units"),
        ("graphpp/_torch/aot.py", '"""2.13: `_a`, f."""\nfrom torch.x import _a\nfrom torch._y import f\n_a._b'),
        ("graphpp/passes/a.py", "import torch\ntorch.ops.aten._unsafe_view.default"),
        ("graphpp/api.py", "import torch\ntorch.ones(2)._base"),
        ("graphpp/api.py", "passes = runtime = None\nprint(passes, runtime)"),
        ("tests/a.py", "import torch\ntorch._dynamo.reset()"),
    ],
)
def test_what_is_allowed_passes(file: str, source: str) -> None:
    assert faults(file, source) == []
