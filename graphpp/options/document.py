"""Prints `docs/options.md` from the declarations: `python -m graphpp.options.document > docs/options.md`."""

from __future__ import annotations

from collections.abc import Iterator

from graphpp.options.debug import Debug
from graphpp.options.gradients import Gradients
from graphpp.options.memory import Memory
from graphpp.options.option import Group, Option
from graphpp.options.options import Options
from graphpp.options.parallel import Parallel

GROUPS: tuple[type[Group], ...] = (Options, Memory, Gradients, Parallel, Debug)

_HEAD = """# Options

`graphpp.compile(model, loss, *, ...)` and `graphpp.verify(model, loss, example, *, ...)` take the same options. Each option is
declared once, in `graphpp/options/`; this page is printed from the declarations (`make options`).

Two arguments are data, not options. `example=` is one `graphpp.Microbatch`, for its shapes (None: taken from the first step;
`verify` needs its data, or a list of all microbatches). `mesh=` says where this rank stands: a `DeviceMesh` with the dimensions
`pp` (the ranks of a pipeline) and `dp_replicate` (data parallelism), the process group of the pipeline's ranks, or None for the
world. `verify` has two arguments of its own, `ranks=` and `tolerance=`.

An option that opens a group takes the group's dataclass, or the short form in the table: `memory=0.5` is
`memory=graphpp.Memory(recompute=0.5)`, `debug="folder"` is `debug=graphpp.Debug(dump="folder")`.
"""


def document() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *(line for group in GROUPS for line in _table(group))])


def _table(group: type[Group]) -> Iterator[str]:
    title = f"`graphpp.{group.__name__}`, in `{group.prefix}=`" if group.prefix else "`graphpp.compile`"
    yield f"## {title}\n"
    yield "| option | default | takes | effect |\n|---|---|---|---|"
    for option in group.options():
        yield "| " + " | ".join(map(_cell, _row(option))) + " |"
    yield ""


def _row(option: Option[object, object]) -> tuple[str, str, str, str]:
    default = f'`"{option.default}"`' if isinstance(option.default, str) else f"`{option.default}`"
    return f"`{option.name}`", default, option.takes, option.about


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(document(), end="")
