"""Write `docs/options.md` and the pages of `docs/options/` from the declarations: `python -m graphpp.options.document docs`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from inspect import cleandoc
from pathlib import Path

from graphpp.options.backend import Custom, Eager, Inductor
from graphpp.options.debug import Debug
from graphpp.options.gradients import Gradients
from graphpp.options.memory import Memory
from graphpp.options.microbatches import Microbatches
from graphpp.options.offload import Offload
from graphpp.options.option import Group, Option
from graphpp.options.options import Options
from graphpp.options.parallel import Parallel
from graphpp.options.recompute import Recompute

GROUPS: tuple[type[Group], ...] = (Options, Microbatches, Memory, Gradients, Parallel, Debug)
PAGES: dict[str, tuple[type, ...]] = {  # a page -> the groups, and the dataclasses that single options take, of which it tells
    "options.md": (Options, Microbatches, Gradients, Debug),
    "options/memory.md": (Memory, Recompute, Offload),
    "options/parallel.md": (Parallel,),
    "options/backend.md": (Eager, Inductor, Custom),
}

_HEAD = """# Options

`graphpp.compile(model, loss, *, ...)` and `graphpp.verify(model, loss, example, *, ...)` take the same options. Each option is
declared once, in `graphpp/options/`. This page and [memory](options/memory.md), [parallel](options/parallel.md) and
[backend](options/backend.md) are printed from the declarations (`make options`).

Two arguments are data, not options. `example=` is one `graphpp.Microbatch`, for its shapes (None: taken from the first step;
`verify` needs its data, or a list of all microbatches). `mesh=` says where this rank stands: a `DeviceMesh` with the dimensions
`pp` (the ranks of a pipeline), `dp_replicate` and `dp_shard` (data parallelism), `cp` (context parallelism), `tp` (tensor
parallelism) and `ep` (expert parallelism), a group of the pipeline's ranks, or None for the world; see [Meshes](meshes.md).
`verify` has three arguments of its own, `ranks=`, `tolerance=` and `against=`.

Where an option takes a function, an exception of the function becomes the cause of a `GraphPPError` that names the option. A
result that the option cannot use is refused likewise. Regions that a `backend` function fails to compile run eagerly, with a
warning.

An option that opens a group takes the group's dataclass, or the short form in the table: `memory=0.5` is
`memory=graphpp.Memory(recompute=0.5)`, `debug="folder"` is `debug=graphpp.Debug(dump="folder")`.
"""
_LINK = re.compile(r"\]\((?=[\w/]+\.md)")


def documents() -> dict[str, str]:
    """Each page as Markdown, by its path below docs/. Links in the declarations are relative to docs/."""
    return {page: _page(page, kinds) for page, kinds in PAGES.items()}


def _page(page: str, kinds: tuple[type, ...]) -> str:
    head = _HEAD if page == "options.md" else f"# Options: {Path(page).stem}\n\nA part of [Options](../options.md).\n"
    lines = [line for kind in kinds for line in (_table(kind) if issubclass(kind, Group) and kind in GROUPS else _fields(kind))]
    text = "\n".join(lines)
    return f"{head}\n{text if page == 'options.md' else _LINK.sub('](../', text)}"


def _table(group: type[Group]) -> Iterator[str]:
    title = f"`graphpp.{group.__name__}`, in `{group.prefix}=`" if group.prefix else "`graphpp.compile`"
    yield f"## {title}\n"
    yield "| option | default | takes | effect |\n|---|---|---|---|"
    for option in group.options():
        yield _row(option)
    yield ""


def _fields(kind: type) -> Iterator[str]:
    """Signature and docstring of a dataclass that an option takes."""
    yield f"## `graphpp.{kind.__name__}`\n"
    shown = [f"{item.name}={'{}' if item.default is MISSING else repr(item.default)}" for item in fields(kind)]
    yield f"```text\ngraphpp.{kind.__name__}({', '.join(shown)})\n```\n".replace("function={}", "function")
    yield f"{cleandoc(kind.__doc__ or '')}\n"


def _row(option: Option[object, object]) -> str:
    default = f'`"{option.default}"`' if isinstance(option.default, str) else f"`{option.default}`"
    cells = f"`{option.name}`", default, option.takes, option.about
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    for page, text in documents().items():
        file = Path(sys.argv[1]) / page
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
