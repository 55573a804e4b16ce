"""Small scheduling problems, drawn from seeds, whose optima or lower bounds are known: `optima.json` beside this file.

Contract
    `CASES` are 2 to 4 ranks, 2 to 8 microbatches, 1 or 2 stages a rank (in a loop or a V), under caps from the bytes of one
    microbatch to no cap, in five families of costs (`_FAMILIES`). `known()` gives the makespan of the best known table, and a
    lower bound of all tables. OR-tools' CP-SAT found both on 2026-11-25; its model of these problems, whose times are whole
    numbers, is `tests/schedules/search/exact.py` of commit eacd6bb.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from random import Random

from graphpp.schedules.check.step_memory import peak_bytes
from graphpp.schedules.search.arguments import one_by_one, placements
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule

OPTIMA = Path(__file__).with_name("optima.json")


@dataclass(frozen=True)
class Case:
    """One problem. `caps`: bytes of each rank, infinite without a cap."""

    name: str
    costs: Costs
    home: Mapping[int, int]
    microbatches: int
    caps: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.caps)

    def search(self, effort: float = 1.0) -> Schedule:
        """The table that `schedule_auto` finds."""
        cap = None if inf in self.caps else [int(each) for each in self.caps]
        return schedule_auto(
            self.costs, cap, ranks=self.ranks, microbatches=self.microbatches, placement=self.home, effort=effort
        )


@dataclass(frozen=True)
class Known:
    """The makespan of the best table that is known, and a lower bound of all tables; equal where the optimum is proven."""

    makespan: int
    bound: int


def known() -> dict[str, Known]:
    """The stored results, by the name of the case."""
    return {name: Known(*numbers) for name, numbers in json.loads(OPTIMA.read_text()).items()}


def _uneven(random: Random, stages: int) -> Costs:
    """F, I and W drawn apart, messages that take time, half of the bytes kept between I and W."""
    each = tuple(_stage(random) for _ in range(stages))
    return Costs(each, _sends(random, stages), _sends(random, stages))


def _unit(random: Random, stages: int) -> Costs:
    """The costs of the papers' pictures: F = I = W, and messages take no time."""
    return Costs((StageCosts(100, 100, 100, saved_bytes=1000),) * stages)


def _forms(random: Random, stages: int) -> Costs:
    """Whole backwards that are faster than their parts, or need fewer bytes; programs that need bytes while they run."""
    stages_ = []
    for _ in range(stages):
        each = _stage(random)
        whole = 10 * round((each.input_grad + each.weight_grad) * random.choice((0.8, 0.9, 1.0)) / 10)
        kept = random.choice((each.saved_bytes // 3, each.saved_bytes, each.saved_bytes + 200))
        working = {kind: random.randint(500, 1700) for kind in random.sample((Kind.F, Kind.B, Kind.I, Kind.W), 2)}
        stages_.append(replace(each, backward=whole, kept_bytes=kept, peak_bytes=working))
    return Costs(tuple(stages_), _sends(random, stages), _sends(random, stages))


def _overlap(random: Random, stages: int) -> Costs:
    """A forward and a backward that run together take 80 % of the time."""
    return replace(_uneven(random, stages), overlap=0.8)


def _blocking(random: Random, stages: int) -> Costs:
    """Messages occupy both ranks."""
    return replace(_uneven(random, stages), blocking=True, overhead=2.0)


def _stage(random: Random) -> StageCosts:
    saved = random.randint(700, 1300)
    forward, inputs, weights = (10 * random.randint(*span) for span in ((5, 15), (5, 20), (3, 15)))
    return StageCosts(forward, inputs, weights, saved_bytes=saved, kept_bytes=saved // 2)


def _sends(random: Random, stages: int) -> tuple[int, ...]:
    return tuple(random.randint(0, 30) for _ in range(stages - 1))


_LAYOUTS = ((1, "loop"), (2, "loop"), (2, "v"))
_FAMILIES = {
    _uneven: (product((2, 3, 4), _LAYOUTS, (3, 8)), (1.0, 1.4, 2.2, inf)),
    _unit: (product((2, 3, 4), _LAYOUTS, (6,)), (1.5, 2.0, 3.0)),
    _forms: (product((2, 3, 4), _LAYOUTS, (5,)), (1.0, 1.9, inf)),
    _overlap: (product((2, 3, 4), _LAYOUTS, (4,)), (1.0, 1.9, inf)),
    _blocking: (product((2, 3), _LAYOUTS, (4,)), (1.0, 1.7, inf)),
}
"""By family: the sizes (ranks, (stages a rank, placement), microbatches), and the caps in bytes of one microbatch alone."""


def _grid() -> Iterator[Case]:
    for family, (sizes, factors) in _FAMILIES.items():
        for ranks, layout, microbatches in sizes:
            yield from _cases(family, ranks, layout, microbatches, factors)


def _cases(
    family: Callable[[Random, int], Costs], ranks: int, layout: tuple[int, str], microbatches: int, factors: Iterable[float]
) -> Iterator[Case]:
    """The cases of one pipeline under several caps; the costs are drawn from the name."""
    chunks, placement = layout
    word = f"{family.__name__.strip('_')} {ranks}x{microbatches} {placement}{chunks}"
    costs = family(Random(word), ranks * chunks)
    [home] = placements(ranks * chunks, placement, ranks)
    need = peak_bytes(one_by_one(costs, home, ranks, 1), costs)
    for factor in factors:
        caps = tuple(int(factor * each) if factor < inf else inf for each in need)
        yield Case(f"{word} cap {factor:g}", costs, home, microbatches, caps)


CASES = tuple(_grid())
