"""The choices of a plan that a layout fixes; the search finds those that stay open.

Contract: `Fixed.values` has a value for each fixed name of `CHOICES`. What cannot run raises `ScheduleError` with the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate, cycle, islice, pairwise
from typing import Any

from graphpp.arguments import COUNT, FLAG, INDEX, TEXT, Accepted, one_word, or_none, require
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.plans import settings
from graphpp.cluster_planner.plans.mesh_shapes import SIZES, MeshShape
from graphpp.cluster_planner.plans.prediction.single_layers import layers_of_stages
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice
from graphpp.errors import ScheduleError
from graphpp.planner.megatron_layout import Layout as StageLetters
from graphpp.planner.segments import Cut
from graphpp.schedules.generate.megatron_interleaved import legal_groups
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.placement import usual_stages

_WORD = Accepted('None, "selective", "full", or a fraction',
    lambda value: value in (None, "selective", "full") or settings.FRACTION.accepts(value))  # fmt: skip
_COUNTS = Accepted("a number of layers, a share of them, or the number of each stage (of one: of all stages)",
    lambda value: INDEX.accepts(value) or settings.FRACTION.accepts(value) or _all(INDEX, value))  # fmt: skip
_SPLIT = Accepted("the FQNs at which stages start, the layers of each stage, or a layout of Megatron-Core (Et*2|t*2L)",
    lambda value: TEXT.accepts(value) or _all(TEXT, value) or _all(INDEX, value))  # fmt: skip
CHOICES: Mapping[str, Accepted] = {
    **dict.fromkeys((*SIZES, "rows", "microbatches", "stages", "stages_per_rank"), COUNT),
    "folded": FLAG,
    "schedule": one_word(*(name for name in SCHEDULES if name != "ForwardOnly"), settings.ORDER),
    "group": or_none(COUNT), "order": or_none(TEXT), "keep": or_none(INDEX),
    "split": _SPLIT, "recompute": _WORD, "recomputed": _COUNTS, "offload": or_none(settings.FRACTION), "word_parts": FLAG,
    "logits_tokens": or_none(COUNT),
}  # fmt: skip
"""The choices that a layout may fix, with the values that each takes. `stages`: of all ranks together; `recomputed`: the layers
that `recompute` covers; others: as in `PlanSetting` and `ScheduleChoice`."""


def _all(accepted: Accepted, value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(accepted.accepts, value))


@dataclass(frozen=True)
class Fixed:
    """`values`: by name of `CHOICES`. `cut`: the first segment of each stage, made from `values["split"]` (None: open)."""

    values: Mapping[str, Any] = field(default_factory=dict)
    cut: Cut | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], costs: ModelCosts) -> Fixed:
        """The choices for a model. Raises `ScheduleError` for names and values that it does not have."""
        for name, value in values.items():
            if name not in CHOICES:
                near = "".join(f", did you mean {each}?" for each in get_close_matches(str(name), CHOICES, 1))
                raise ScheduleError(f"like: take {', '.join(CHOICES)}, got {name!r}{near}")
            require(ScheduleError, f"like: {name}", CHOICES[name], value)
        if "recomputed" in values and values.get("recompute") not in ("selective", "full"):
            raise ScheduleError('like: recomputed: give recompute="selective" or "full" beside it')
        if "order" in values and "schedule" not in values:
            raise ScheduleError("like: order: give the schedule that it comes from beside it")
        cut = _cut(costs, values["split"]) if "split" in values else None
        if cut is None:
            return cls(values)
        if values.get("stages", len(cut)) != len(cut) or values.get("word_parts"):
            raise ScheduleError(f"like: split has {len(cut)} stages, of whole words: leave out split, stages or word_parts")
        return cls({**values, "stages": len(cut)}, cut)

    def among(self, name: str, usual: Sequence[Any]) -> Sequence[Any]:
        """The fixed value, or those that the search tries."""
        return (self.values[name],) if name in self.values else usual

    def admits(self, shape: MeshShape) -> bool:
        return self.values.get("folded", shape.folded) is shape.folded

    @property
    def sizes(self) -> dict[str, int]:
        return {name: self.values[name] for name in SIZES if name in self.values}

    def schedules(self, names: Sequence[str] | None, ranks: int, microbatches: int, most: int) -> Iterator[ScheduleChoice]:
        """The schedules of at most `most` stages; `names`: those that the search may try (None: all)."""
        if self.values.keys().isdisjoint(("schedule", "stages", "stages_per_rank", "group")):
            each = settings.schedule_choices(ranks, microbatches, most)
            yield from (choice for choice in each if names is None or choice.name in names)
            return
        loop = ranks == 1
        usual = [name for name in settings.SEARCHED if (names is None or name in names) and (name == "auto") == loop]
        for name in self.among("schedule", usual):
            for per_rank in self.stages_per_rank(name, ranks):
                for group in self._groups(name, ranks, microbatches):
                    choice = self.choice(name, ranks, per_rank, group)
                    if choice.stages_on(ranks) <= most and settings.admits(choice, ranks, microbatches):
                        yield choice

    def choice(self, name: str, ranks: int, per_rank: int, group: int | None) -> ScheduleChoice:
        order, stages = (self.values.get(each) for each in ("order", "stages"))
        return ScheduleChoice(name, per_rank, group, order, None if order is None or stages == ranks * per_rank else stages)

    def stages_per_rank(self, name: str, ranks: int) -> Sequence[int]:
        if "order" in self.values and "stages" in self.values:
            return self.among("stages_per_rank", (-(-self.values["stages"] // ranks),))
        if "stages" in self.values:
            per_rank, rest = divmod(self.values["stages"], ranks)
            return () if rest or per_rank != self.values.get("stages_per_rank", per_rank) else (per_rank,)
        usual = settings.SEVERAL if name in settings.INTERLEAVED else (usual_stages(SCHEDULES.get(name), ranks) // ranks,)
        return self.among("stages_per_rank", usual)

    def _groups(self, name: str, ranks: int, microbatches: int) -> Sequence[int | None]:
        if name != "MegatronInterleaved":
            return (None,) if self.values.get("group") is None else ()
        legal = legal_groups(ranks, microbatches)
        return self.among("group", sorted({legal[0], legal[len(legal) // 2]}))

    def remembered(self, request: PlanRequest, setting: PlanSetting) -> PlanSetting:
        """The setting with the fixed offload and number of recomputed layers."""
        setting = replace(setting, offload=self.values.get("offload"))
        if "recomputed" not in self.values:
            return setting
        request = request.of(setting)
        held = [len(layers) for layers in layers_of_stages(request.costs, self.cut or request.stages(setting).cut)]
        counts = _spread(self.values["recomputed"], held)
        return replace(setting, recomputed=counts) if any(counts) else replace(setting, recompute=None)


def _spread(given: Any, held: Sequence[int]) -> tuple[int, ...]:
    """The recomputed layers of each stage, of those that it has; a number in all is spread evenly, the first stages first."""
    if isinstance(given, list | tuple):
        found = [min(given[0], have) for have in held] if len(given) == 1 else list(given)
    else:
        found, total = [0] * len(held), given if isinstance(given, int) else round(given * sum(held))
        free = (stage for stage in cycle(range(len(held))) if found[stage] < held[stage])
        for stage in islice(free, min(total, sum(held))):
            found[stage] += 1
        found[0] += total - sum(found)  # too many: refused below
    if len(found) != len(held) or any(count > have for count, have in zip(found, held, strict=True)):
        raise ScheduleError(f"like: recomputed: the stages have {'+'.join(map(str, held))} layers: take fewer than {given}")
    return tuple(found)


def _cut(costs: ModelCosts, split: Any) -> Cut:
    """The first segment of each stage."""
    if isinstance(split, str):
        split = [sum(letter in "tm" for letter in letters) for letters in StageLetters(split).stages]
    if isinstance(split[0], str):
        unknown = next((name for name in split if name not in costs.names), None)
        if unknown is not None:
            near = get_close_matches(unknown, costs.names, 3) or costs.names[1:4]
            raise ScheduleError(f"like: split: no stage can start at {unknown!r}: take FQNs such as {', '.join(near)}")
        cut = (0, *map(costs.names.index, split))
    else:
        layers = costs.layers
        if sum(split) != len(layers):
            raise ScheduleError(f"like: split has {sum(split)} layers, and the model has {len(layers)}: give that many")
        end = next((at for at in range(layers[-1] + 1, len(costs.names)) if not costs.names[at].startswith(
            f"{costs.names[layers[-1]]}.")), len(costs.names))  # fmt: skip
        cut = (0, *((*layers, end)[before] for before in list(accumulate(split))[:-1]))
    if any(one >= other for one, other in pairwise((*cut, len(costs.names)))):
        raise ScheduleError("like: split: a stage is empty, or stages are out of execution order: give each a layer or more")
    return cut
