"""Tables of text for a terminal or a file: one layout for all graphpp output, without colours or trailing spaces."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence


def text_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str] = (),
    wraps: Collection[str] = (),
    title: str | None = None,
    caption: str | None = None,
    width: int = 110,
    lines: bool = True,
) -> str:
    """`left`: left-aligned columns; `wraps`: columns whose cells may wrap; `lines`: draw a line below the heads. Blank lines
    stay only around a table with a title or a caption."""
    from rich import box  # loaded by the first table that is printed
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    framed = {"box": box.SIMPLE} if lines else {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    table = Table(title=title, title_justify="left", caption=caption, **framed)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=head not in wraps)
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(table)
    found = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(found if title or caption else [line for line in found if line])
