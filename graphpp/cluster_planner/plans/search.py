"""The predictions that a search for plans has so far, the work that is left, and how a prediction is added or refined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from graphpp.cluster_planner.plans.estimate import Estimate
from graphpp.cluster_planner.plans.found_plans import rounded
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.prediction.read_tables import Work
from graphpp.cluster_planner.plans.refine.least_memory import least_recompute
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, RecomputeWord
from graphpp.planner.segments import Cut

_TRIALS = 8  # predictions' time that one search of the least recomputation takes


@dataclass
class Search:
    """The predictions so far. `words`: kinds of recomputation that may apply to some layers only; `cut`: of a layout (None: the
    most balanced one); `considered`: number of settings estimated."""

    request: PlanRequest
    cap: int
    words: Sequence[RecomputeWord]
    cut: Cut | None = None
    considered: int = 0
    work: Work = field(default_factory=Work)
    found: dict[PlanSetting, Prediction] = field(default_factory=dict)
    tried: set[PlanSetting] = field(default_factory=set)

    def add(self, prediction: Prediction | None) -> None:
        if prediction is not None:
            self.found.setdefault(prediction.setting, prediction)

    def fitting(self) -> Iterator[tuple[Prediction, Search]]:
        return ((each, self) for each in self.found.values() if each.over(self.cap) <= 0)

    def refine(self, refined: Callable[[PlanRequest, Prediction, int], Prediction | None], named: Prediction) -> bool:
        """Add the refined plan if it is faster than the named one, and say whether it is."""
        found = refined(self.request, named, self.cap)
        if found is None or rounded(found) >= rounded(named):
            return False
        self.add(replace(found, moved=named.moved if found.cut == named.cut else 0.0))
        return True

    def known(self, setting: PlanSetting, guess: Estimate) -> Estimate:
        found = self.found.get(setting)
        return guess if found is None else Estimate(found.seconds.total, found.peak)

    def least(self, setting: PlanSetting) -> None:
        """Add the setting with the fewest recomputed layers that fits."""
        if setting not in self.tried and self.work.take(setting, _TRIALS):
            self.tried.add(setting)
            chosen = least_recompute(self.request, setting, self.cap)
            if chosen is not None and chosen[0] not in self.found:
                self.add(predict(self.request, *chosen))
