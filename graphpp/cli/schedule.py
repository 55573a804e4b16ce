"""`graphpp schedule show|check|simulate|compare`: tables by name or file, without running a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graphpp.cli.command import Answer, add_command, write_text
from graphpp.cli.schedule_inputs import SCHEDULE_HELP, Counts, complete_name, read_schedule, table_by_name, table_of
from graphpp.cli.simulated import facts_of, read_costs, simulated, spell_counts
from graphpp.errors import GraphPPError, ScheduleError
from graphpp.report.page_html import html
from graphpp.report.text_table import text_table
from graphpp.schedules.check.checker import check as check_table
from graphpp.schedules.draw.chrome_trace import chrome_trace
from graphpp.schedules.draw.svg import svg
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule

Source = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help=SCHEDULE_HELP, show_default=False, autocompletion=complete_name)
]
Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME|FILE", help=SCHEDULE_HELP, show_default=False, autocompletion=complete_name),
]
Ranks = Annotated[int | None, typer.Option(min=1, help="For how many ranks.")]
Stages = Annotated[int | None, typer.Option(min=1, help="With how many stages; by default the schedule's usual number.")]
Microbatches = Annotated[int | None, typer.Option(min=1, help="For how many microbatches.")]
CostsFile = Annotated[Path | None, typer.Option("--costs", help="Times and bytes of the stages: graphpp.Costs as JSON.")]
Written = Path | None
_WIDE = 10_000  # characters: no cell is cut, since scripts read tables too


def add_to(root: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show, check, simulate and compare tables of actions.")
    root.add_typer(group, name="schedule")
    for function in (show, check, simulate, compare):
        add_command(group, function.__name__)(function)


def show(  # noqa: PLR0913 - one option for each form of the table
    source: Source,
    ranks: Ranks = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    csv: Annotated[Written, typer.Option(help="Write the table as torch's CSV.")] = None,
    svg_file: Annotated[Written, typer.Option("--svg", help="Write a chart of the simulated step.")] = None,
    html_file: Annotated[Written, typer.Option("--html", help="Write the chart as a page with a table of numbers.")] = None,
    trace: Annotated[Written, typer.Option("--chrome-trace", help="Write the events for Perfetto.")] = None,
    costs: CostsFile = None,
) -> Answer:
    """Print the table of a schedule: a line for each rank, `2F0` is the forward of microbatch 0 in stage 2."""
    known = None if costs is None else read_costs(costs)
    table = table_of(source, _counts(known, ranks, stages, microbatches))
    pictures: list[tuple[Written, Callable[[], str]]] = [
        (svg_file, partial(svg, table, costs=known)),
        (html_file, partial(html, table, costs=known)),
        (trace, partial(chrome_trace, table, costs=known)),
    ]
    texts = [(file, make()) for file, make in pictures if file is not None]  # before the first file is written
    for file, text in texts:
        write_text(file, text)
    if csv is not None:
        table.save(csv)
    files = [str(file) for file in (*(file for file, _ in texts), csv) if file is not None]
    rows = [" ".join(str(cell or ".") for cell in row) for row in table.table]
    return Answer(str(table), {**facts_of(table), "table": rows, "written": files}, notes=[f"wrote {file}" for file in files])


def check(source: Source, ranks: Ranks = None, stages: Stages = None, microbatches: Microbatches = None) -> Answer:
    """Prove that a table computes everything once and cannot deadlock. Exit code 1 with the fault where it does not."""
    try:
        known = read_schedule(source)  # the checker explains counts of a file that differ from the given ones
        table = known if isinstance(known, Schedule) else table_by_name(known, Counts(ranks, stages, microbatches))
        training = bool(table.kinds - {Kind.F})
        check_table(
            table, ranks=ranks or table.ranks, stages=stages or table.stages,
            microbatches=microbatches or table.microbatches, training=training,
        )  # fmt: skip
    except ScheduleError as fault:
        where = f"\n{source}: rank 0 is line 1, column 0 is cell 1" if source.casefold().endswith(".csv") else ""
        return Answer(f"{fault}{where}", {"accepted": False, "schedule": source, "message": f"{fault}{where}"}, yes=False)
    kind = "" if training else " (forwards only)"
    said = f"{table.name}{kind}: complete, in order, cannot deadlock; {spell_counts(table)}"
    return Answer(said, {"accepted": True, "schedule": source, "training": training, **facts_of(table)})


def simulate(
    source: Source,
    ranks: Ranks = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    costs: CostsFile = None,
) -> Answer:
    """Simulate one step: how long it takes, how long each rank waits, how much each rank holds."""
    known = None if costs is None else read_costs(costs)
    found = simulated(table_of(source, _counts(known, ranks, stages, microbatches)), known)
    table = found.timeline.schedule
    heads = ("rank", "busy", "bubble", "peak activations")
    numbers = [
        (str(rank), found.time(found.timeline.busy(rank)), f"{found.timeline.bubble(rank):.1%}", found.size(rank))
        for rank in range(table.ranks)
    ]
    ranks_text = text_table(heads, numbers, width=_WIDE, lines=False)
    text = f"{table.name}, {spell_counts(table)}: a step takes {found.makespan}\n\n{ranks_text}"
    return Answer(text, found.document())


def compare(
    sources: Sources = None,
    ranks: Ranks = None,
    stages: Stages = None,
    microbatches: Microbatches = None,
    costs: CostsFile = None,
) -> Answer:
    """Simulate several schedules, by default all that graphpp knows, and list the fastest first."""
    known = None if costs is None else read_costs(costs)
    counts = _counts(known, ranks, stages, microbatches)
    tables, refused = ([table_of(each, counts) for each in sources], {}) if sources else _all_known(counts)
    found = [simulated(table, known) for table in tables]
    found.sort(key=lambda each: each.timeline.makespan)
    heads = ("schedule", "ranks", "stages", "microbatches", "step", "bubble", "peak activations")
    rows = []
    for each in found:
        table = each.timeline.schedule
        numbers = map(str, (table.ranks, table.stages, table.microbatches))
        rows.append((table.name, *numbers, each.makespan, f"{each.bubble:.1%}", each.peak))
    lines = [text_table(heads, rows, left=("schedule",), width=_WIDE, lines=False)]
    lines += [f"{name}: does not fit. {message}" for name, message in refused.items()]
    return Answer("\n".join(lines), {"schedules": [each.document() for each in found], "refused": refused})


def _counts(costs: Costs | None, ranks: int | None, stages: int | None, microbatches: int | None) -> Counts:
    return Counts(ranks, stages, microbatches, None if costs is None else len(costs.stages))


def _all_known(counts: Counts) -> tuple[list[Schedule], dict[str, str]]:
    """Tables of all known names that train and fit the counts, and error messages of the others."""
    if counts.ranks is None or counts.microbatches is None:
        raise GraphPPError("name schedules or files to compare; to compare all known ones, give --ranks and --microbatches")
    tables, refused = [], {}
    for name in SCHEDULES:
        if name not in ("auto", "ForwardOnly"):  # "auto" picks one of the others; ForwardOnly does not train
            try:
                tables.append(table_by_name(name, counts))
            except ScheduleError as fault:
                refused[name] = str(fault)
    if not tables:
        raise ScheduleError("\n".join(["no schedule fits these numbers:", *refused.values()]))
    return tables, refused
