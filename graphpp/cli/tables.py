"""Columns of text for a terminal or a file."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence


def columns(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> str:
    """The rows under their heads, without colours and lines; numbers to the right, the columns in `left` to the left."""
    from rich.console import Console  # loaded by the first table that is printed
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=10_000, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
