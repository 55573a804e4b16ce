"""Print `docs/options.md` from the declarations: `python -m graphpp.options.document > docs/options.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from inspect import cleandoc

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
KINDS: tuple[type, ...] = (Eager, Inductor, Custom, Recompute, Offload)  # dataclasses that single options take

_HEAD = """# Options

`graphpp.compile(model, loss, *, ...)` and `graphpp.verify(model, loss, example, *, ...)` take the same options. Each option is
declared once, in `graphpp/options/`; this page is printed from the declarations (`make options`).

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


def document() -> str:
    """The page, as Markdown."""
    tables = [line for group in GROUPS for line in _table(group)]
    return "\n".join([_HEAD, *tables, *(line for kind in KINDS for line in _fields(kind))])


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
    print(document(), end="")
