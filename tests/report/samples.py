"""Report pages for the tests: made of simulated schedules, without a model."""

from __future__ import annotations

from dataclasses import replace

import graphpp
from graphpp.report.memory_view import MemoryView
from graphpp.report.page import BoundaryView, Cell, Page, PlanEntry, RelayView, StageView, ValueView
from graphpp.report.run_view import RunView
from graphpp.report.timeline_view import TimelineView
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.simulate.bytes_over_time import bytes_over_time
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.state_bytes import StateBytes, held_bytes

NASTY = "</script><img src=x onerror=\"document.title='broken'\">'\"&\u2028{{ 7 * 7 }}"
MIB = 2**20


def costs(stages: int) -> Costs:
    """Costs of stages that are not alike; milliseconds of work and MiB of activations."""
    each = tuple(
        StageCosts(0.004 + 0.001 * (stage % 3), 0.004, 0.003 + 0.001 * (stage % 2), saved_bytes=(3 + stage % 4) * MIB)
        for stage in range(stages)
    )
    return Costs(each, (0.0003,) * (stages - 1), (0.0003,) * (stages - 1), blocking=True)


def timeline(name: str, ranks: int, stages: int, microbatches: int) -> Timeline:
    """The simulated step of a named schedule, with its messages."""
    return simulate(add_send_recv(make_table(name, ranks, stages, microbatches)), costs(stages))


def slower(simulated: Timeline, by: float = 1.07) -> Timeline:
    """A timeline that stands for the measured one of a simulated step."""
    events = tuple(Event(each.rank, each.action, each.start * by, each.end * by) for each in simulated.events)
    return replace(simulated, events=events, name="measured")


def memory(simulated: Timeline, caps: list[int] | None) -> MemoryView:
    """The memory of a simulated step."""
    stages, ranks = simulated.schedule.stages, simulated.schedule.ranks
    state = [StateBytes((stage,), (stage,), 20 * MIB, 20 * MIB, optimizer=40 * MIB, buffers=MIB) for stage in range(stages)]
    held = held_bytes(state, simulated.schedule.rank_of_stage, ranks)
    return MemoryView.of(bytes_over_time(simulated, costs(stages), held), caps, note="bytes of the plan")


def plans() -> tuple[PlanEntry, ...]:
    """Plans that fit a cap of 300 MiB, and one that does not."""
    return (
        plan("ZBVZeroBubble", 2, 0.081, 290, on_front=True),
        plan("Interleaved1F1B", 2, 0.09, 200, "slower by 11.11%", on_front=True),
        plan("1F1B", 4, 0.1, 180, "slower by 23.46%", on_front=True),
        plan("GPipe", 4, 0.11, 280, "slower by 35.80%"),
        plan("LoopedBFS", 2, 0.08, 420, "120.0 MiB over the cap", fits=False),
        plan("GPipe", 8, 0.12, 300, "slower by 48.15%", yours=True),
    )


def plan(schedule: str, pp: int, seconds: float, mib: int, reason: str = "", **marks: bool) -> PlanEntry:
    """A plan with a step on at most four ranks; one of eight ranks has none."""
    own = "yours: " if marks.get("yours") else ""
    choices = Cell("pp", pp, str(pp)), Cell("tp", 1, "1"), Cell("schedule", schedule, schedule)
    idle, weights = seconds / pp, 100 * MIB
    return PlanEntry(
        f"{own}pp {pp}, {schedule}", seconds, mib * MIB, reason, **marks,
        choices=choices, results=(Cell("step", seconds, f"{seconds * 1000:g} ms"), Cell("memory", mib, f"{mib}.0 MiB")),
        texts={"mesh": f"pp {pp}", "schedule": schedule, "dtype": "float32"},
        numbers=(
            ("step", "seconds", seconds), ("forward", "seconds", seconds - idle), ("bubble", "seconds", idle),
            ("share of the bubble", "share", 1 / pp), ("memory at the most", "bytes", mib * MIB), ("weights", "bytes", weights),
            ("activations", "bytes", mib * MIB - weights), ("sent along pp", "bytes", pp * MIB),
        ),
        timeline=TimelineView.of(timeline("1F1B", pp, pp, 8), "few microbatches", whole=pp == 2) if pp < 8 else None,
    )  # fmt: skip


def full_page(name: str = "Interleaved1F1B", ranks: int = 4, stages: int = 8, microbatches: int = 8, word: str = "") -> Page:
    """A page with every section. `word` stands in each text that a user's model could bring."""
    simulated = timeline(name, ranks, stages, microbatches)
    skip = ValueView(f"add_3{word}", 2 * MIB, "float32[4, 64, 2048]", f"encoder.layers.0{word} (model.py:31)")
    usual = ValueView(f"relu{word}", MIB, "float32[4, 32, 2048]", f"encoder{word}")
    relayed = [2 * MIB * (boundary < 3) for boundary in range(stages - 1)]
    return Page(
        title=f"Report of a step {word}".strip(),
        facts=(("schedule", name), ("stages", str(stages)), ("ranks", str(ranks)), ("step", f"417 ms {word}".strip())),
        notes=(f"The costs are estimated from the shapes of operations. {word}".strip(),),
        timelines=(TimelineView.of(simulated, note=word), TimelineView.of(slower(simulated))),
        memory=memory(simulated, [400 * MIB] * ranks),
        stages=tuple(
            StageView(stage, stage % ranks, (f"layers.{stage}{word}",), 5_242_880, 20 * MIB, (3 + stage % 4) * MIB)
            for stage in range(stages)
        ),
        boundaries=tuple(
            BoundaryView(stage, MIB + relayed[stage], MIB + relayed[stage] // 2, relayed[stage], (usual, skip), (usual,))
            for stage in range(stages - 1)
        ),
        relays=(RelayView(skip, 0, 3, "forward", (1, 2)), RelayView(replace(skip, nbytes=MIB), 3, 0, "backward", (1,))),
        plans=tuple(_worded(each, word) for each in plans()),
        cap=300 * MIB,
        run=RunView.of([2.5 / (1 + 0.1 * step) for step in range(60)], [0.08 + 0.002 * (step % 5) for step in range(60)]),
    )


def _worded(plan: PlanEntry, word: str) -> PlanEntry:
    choices = tuple(each._replace(text=each.text + word) for each in plan.choices)
    texts = {name: text + word for name, text in plan.texts.items()}
    return replace(plan, name=plan.name + word, reason=plan.reason + word, choices=choices, texts=texts)


def big_timeline(ranks: int, microbatches: int) -> graphpp.Timeline:
    """A step with split backwards: three computations of each microbatch on each rank."""
    return simulate(make_table("ZB1P", ranks, ranks, microbatches), replace(costs(ranks), blocking=False))
