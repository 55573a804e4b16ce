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
KINDS: tuple[type, ...] = (Eager, Inductor, Custom, Recompute, Offload)  # dataclasses that single options take
_MARK = re.compile(r"^<!-- printed from ([\w, ]+) -->\n", re.MULTILINE)


def printed(page: Path) -> str:
    """The text of a page, with all that follows the line `<!-- printed from Memory, Offload -->` made of these classes.

    Links in the declarations are relative to docs/.
    """
    head, names, _ = _MARK.split(page.read_text())
    kinds = {kind.__name__: kind for kind in (*GROUPS, *KINDS)}
    lines = [line for name in names.split(", ") for line in _lines(kinds[name])]
    text = "\n".join(["", *lines]).replace("](", "](../" if page.parent.name == "options" else "](")
    return f"{head}<!-- printed from {names} -->\n{text}"


def _lines(kind: type) -> Iterator[str]:
    return _table(kind) if issubclass(kind, Group) else _fields(kind)


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
    for page in [Path(sys.argv[1], "options.md"), *Path(sys.argv[1], "options").glob("*.md")]:
        page.write_text(printed(page))
