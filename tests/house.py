"""The imports of `graphpp/`, read from the source text, and its size: floors, upward arrows, circles, files and lines.

`python -m tests.house [ROOT]` prints the house of a checkout (`make house`), and `tests/test_floors.py` holds it to
`MAY_IMPORT`, `CEILINGS` and `MOST_FILES`. An import inside a function and one under `TYPE_CHECKING` count like any other.
`python -m tests.house --ceilings` prints `CEILINGS` and `MOST_FILES` for the lines and files of this checkout.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx

_PROGRAMS = (  # what passes emit for, symbolic sizes, and numbers that only the data decides
    "graphpp._torch.numbers_of_data",
    "graphpp._torch.symbols",
    "graphpp.runtime.program",
    "graphpp.runtime.gradients",
    "graphpp.runtime.random_keys",
    "graphpp.runtime.parameter_rows",
)

# package -> the packages below it that its files may import, from the lowest floor to the highest. A package may always import
# itself, and graphpp.errors, units, arguments, log, progress and from_json; an entry covers its subpackages.
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "graphpp._torch": (),
    "graphpp.cache": (),
    "graphpp.devices": (),
    "graphpp.streams": (),
    "graphpp.schedules.table": (),
    "graphpp.schedules.check": ("graphpp.schedules.table",),
    "graphpp.schedules.rewrite": ("graphpp.schedules.table", "graphpp.schedules.check"),
    "graphpp.schedules.generate": ("graphpp.schedules.table", "graphpp.schedules.check", "graphpp.schedules.rewrite"),
    "graphpp.schedules.simulate": ("graphpp.schedules.table", "graphpp.schedules.check", "graphpp.schedules.rewrite"),
    "graphpp.schedules.draw": ("graphpp.schedules.table", "graphpp.schedules.simulate"),
    "graphpp.schedules.search": (
        "graphpp.schedules.table",
        "graphpp.schedules.check",
        "graphpp.schedules.rewrite",
        "graphpp.schedules.generate",
        "graphpp.schedules.simulate",
    ),
    "graphpp.schedules": (),
    "graphpp.report": ("graphpp.schedules.table", "graphpp.schedules.simulate"),
    "graphpp.parallel": ("graphpp._torch",),
    "graphpp.runtime": (
        "graphpp._torch",
        "graphpp.streams",
        "graphpp.parallel",
        "graphpp.schedules.table",
        "graphpp.schedules.rewrite",
    ),
    "graphpp.options": ("graphpp.schedules.table", "graphpp.schedules.generate", "graphpp.runtime.program"),
    "graphpp.passes.graph": ("graphpp._torch", *_PROGRAMS),  # for graphs whose Python code is made when they first run
    "graphpp.passes.forward": ("graphpp._torch.operators", "graphpp.passes.graph", *_PROGRAMS),
    "graphpp.passes.text": ("graphpp.passes.graph", *_PROGRAMS),
    "graphpp.passes.joint": ("graphpp.passes.graph", *_PROGRAMS),
    "graphpp.passes.recompute": ("graphpp.passes.graph", *_PROGRAMS),
    "graphpp.passes.stage": (
        "graphpp._torch.operators",
        *(f"graphpp.passes.{each}" for each in ("graph", "text", "joint", "recompute")),
        *_PROGRAMS,
    ),
    "graphpp.passes.overlap": (*(f"graphpp.passes.{each}" for each in ("graph", "text", "stage")), *_PROGRAMS),
    "graphpp.passes": _PROGRAMS,
    "graphpp.backends": (
        "graphpp.cache",
        "graphpp.streams",
        "graphpp.options",
        "graphpp.passes",
        "graphpp.runtime",
        "graphpp._torch",
    ),
    "graphpp.batch": ("graphpp.options", "graphpp.streams", "graphpp._torch"),
    "graphpp.capture": ("graphpp.batch", "graphpp.passes", "graphpp.runtime", "graphpp._torch", "graphpp.options"),
    "graphpp.checkpoint": ("graphpp.parallel", "graphpp.streams", "graphpp._torch"),
    "graphpp.ownership": (
        "graphpp.checkpoint",
        "graphpp.options",
        "graphpp.parallel",
        "graphpp.runtime",
        "graphpp._torch",
    ),
    "graphpp.planner": (
        "graphpp._torch.symbols",
        "graphpp.options",
        "graphpp.batch",
        "graphpp.capture",
        "graphpp.passes",
        "graphpp.report",
        "graphpp.runtime",
        "graphpp.schedules",
    ),
    "graphpp.cluster_planner.costs": (  # fake tensors say how values grow, and layers are called with trees of tensors
        "graphpp._torch.aot",
        "graphpp._torch.pytree",
        "graphpp._torch.symbols",
        "graphpp._torch.this_thread",
        "graphpp.options",
        "graphpp.batch",
        "graphpp.capture",
        "graphpp.devices",
        "graphpp.passes",
        "graphpp.planner",
        "graphpp.runtime",
        "graphpp.schedules",
    ),
    "graphpp.cluster_planner.plans": (
        "graphpp._torch.this_thread",  # no garbage is collected while tables grow
        "graphpp.options",
        "graphpp.batch",
        "graphpp.cluster_planner.costs",
        "graphpp.devices",
        "graphpp.planner",
        "graphpp.report",
        "graphpp.schedules",
    ),
    "graphpp.cluster_planner": (),
}

# folder -> the most lines of its Python files, those of its subfolders included; blank lines and docstrings count. A change
# that needs more lowers another ceiling by as much, or docs/design.md says which user needs the lines.
CEILINGS: Mapping[str, int] = {
    "graphpp": 61_130,
    "graphpp/_torch": 2_780,
    "graphpp/backends": 1_240,
    "graphpp/batch": 980,
    "graphpp/cache": 300,
    "graphpp/capture": 5_560,
    "graphpp/checkpoint": 1_820,
    "graphpp/cli": 2_140,
    "graphpp/cluster_planner": 7_360,
    "graphpp/compiler": 2_470,
    "graphpp/devices": 785,
    "graphpp/integrations": 2_400,
    "graphpp/options": 1_060,
    "graphpp/ownership": 1_420,
    "graphpp/parallel": 2_810,
    "graphpp/passes": 6_410,
    "graphpp/pipeline": 3_730,
    "graphpp/planner": 2_050,
    "graphpp/report": 910,
    "graphpp/runtime": 4_290,
    "graphpp/schedules": 7_880,
    "graphpp/verification": 1_380,
    "tests": 55_600,
}
MOST_FILES = 473  # Python files of graphpp/, `__init__.py` included


@dataclass(frozen=True)
class Arrow:
    """One module of graphpp imports another."""

    source: str
    target: str
    line: int


def modules(root: Path) -> dict[str, Path]:
    """The modules of `root/graphpp` by dotted name; a package is named without `__init__`."""
    found = {str(path.relative_to(root).with_suffix("")).replace("/", "."): path for path in (root / "graphpp").rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def arrows(root: Path) -> list[Arrow]:
    """Every import of one module of graphpp by another."""
    known = modules(root)
    return [
        Arrow(source, target, line)
        for source, path in sorted(known.items())
        for target, line in _imports(ast.parse(path.read_text()), known)
        if target != source
    ]


def _imports(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "graphpp":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in known else node.module), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in known)


def package(module: str, root: Path) -> str:
    """The package that a module is in; a package is in itself."""
    return module if (root / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


def within(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def floor(module: str) -> str | None:
    """The entry of `MAY_IMPORT` for a module; None: the module may import every floor."""
    return max((prefix for prefix in MAY_IMPORT if within(module, prefix)), key=len, default=None)


def allowed(arrow: Arrow) -> bool:
    """Whether `MAY_IMPORT` has an arrow; modules above all listed packages may not be imported by a listed one."""
    anywhere = ("errors", "units", "arguments", "log", "progress", "from_json")
    if any(within(arrow.target, f"graphpp.{each}") for each in anywhere):
        return True
    own = floor(arrow.source)
    if own is not None:
        return any(within(arrow.target, each) for each in (own, *MAY_IMPORT[own]))
    if arrow.target == "graphpp" and within(arrow.source, "graphpp.integrations"):
        return True  # its public names
    if within(arrow.target, "graphpp.integrations"):
        return within(arrow.source, "graphpp.integrations")
    return height(arrow.target) <= height(arrow.source)


HIGH = (
    "graphpp.compiler",
    "graphpp.verification",
    "graphpp.pipeline",
    "graphpp.api",
    "graphpp.integrations",  # trainers' adapters and `cli` share the top floor, and import each other never
    "graphpp.cli",
    "graphpp",
)


def height(module: str) -> int:
    """The floor of a module that may import everything below: 0 for every package of `MAY_IMPORT`."""
    return next((index for index, name in enumerate(HIGH, 1) if within(module, name)), 0) if floor(module) is None else 0


def circles(root: Path) -> list[list[str]]:
    """Modules that import each other, in a circle; a package's `__init__` is imported by none of its own modules."""
    graph = networkx.DiGraph((arrow.source, arrow.target) for arrow in arrows(root))
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def files_per_folder(root: Path) -> dict[str, int]:
    """Python files of each folder, `__init__.py` not counted."""
    counts = Counter(str(path.parent.relative_to(root)) for path in modules(root).values() if path.name != "__init__.py")
    return dict(sorted(counts.items()))


def lines(root: Path) -> dict[str, int]:
    """Lines of the Python files below graphpp/, each of its packages, and tests/."""
    packages = sorted(path.parent for path in root.glob("graphpp/*/__init__.py"))
    return {
        str(folder.relative_to(root)): sum(path.read_text().count("\n") for path in folder.rglob("*.py"))
        for folder in (root / "graphpp", *packages, root / "tests")
    }


def print_ceilings(root: Path) -> None:
    """Print `CEILINGS`, with each folder's lines rounded up to a multiple of 10, and `MOST_FILES`."""
    print("CEILINGS: Mapping[str, int] = {")
    for folder, count in lines(root).items():
        print(f'    "{folder}": {-(-count // 10) * 10:_},')
    print(f"}}\nMOST_FILES = {len(modules(root))}  # Python files of graphpp/, `__init__.py` included")


def print_house(root: Path) -> None:
    """Print files and imports per folder, upward arrows and circles."""
    found = arrows(root)
    for folder, count in files_per_folder(root).items():
        name = folder.replace("/", ".")
        inside = Counter(package(arrow.target, root) for arrow in found if package(arrow.source, root) == name)
        below = ", ".join(f"{each.removeprefix('graphpp.')} {number}" for each, number in inside.most_common())
        print(f"{folder:32} {count:3} files -> {below or 'nothing'}")
    upward = [arrow for arrow in found if not allowed(arrow)]
    for arrow in upward:
        print(f"upward: {arrow.source}:{arrow.line} -> {arrow.target}")
    for circle in circles(root):
        print(f"circle: {' <-> '.join(circle)}")
    print(f"{len(found)} imports, {len(upward)} upward, {len(circles(root))} circles")


def main() -> None:
    arguments = [each for each in sys.argv[1:] if each != "--ceilings"]
    root = Path(arguments[0] if arguments else ".").resolve()
    (print_ceilings if "--ceilings" in sys.argv else print_house)(root)


if __name__ == "__main__":
    main()
