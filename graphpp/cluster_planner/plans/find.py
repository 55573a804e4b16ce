"""Search the fastest way to train a model on machines: every mesh, microbatch, schedule, `keep`, recomputation and offload.

Contract
    in   a `PlanRequest`, the bytes that a GPU may hold, the dimensions along which the model can be cut, the search space
    out  `TrainingPlans` (`found_plans.py`); `ScheduleError` where the work is too little for any
    Equal arguments give equal plans. The work is bounded by the number of simulated computations, not by a clock.

All settings are ordered by `estimate.py`, and simulated in this order (`predict_step.py`): some of those whose estimate is
about the cap, then some of those whose estimate is below it, and so on down to a third of the cap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from graphpp.cluster_planner.plans.estimate import Estimate, estimate, with_offload
from graphpp.cluster_planner.plans.found_plans import TrainingPlans, order, ranked, rounded
from graphpp.cluster_planner.plans.mesh_shapes import MeshLimits, MeshShape, mesh_shapes
from graphpp.cluster_planner.plans.predict_step import Prediction, predict
from graphpp.cluster_planner.plans.read_tables import Work
from graphpp.cluster_planner.plans.refine.better_orders import placed_weight_grads, searched_order
from graphpp.cluster_planner.plans.refine.least_memory import least_offload, least_recompute
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting, RecomputeWord, schedule_choices
from graphpp.cluster_planner.plans.single_layers import layer_names
from graphpp.errors import ScheduleError

_WORK = 150_000  # computations that are simulated
_OFFLOADED = 0.15  # of the work, in addition for settings that fit by offload
_LAST = 0.25  # of the work, in addition where no plan fits yet: for those that take least memory
_ROWS = (1, 2, 4, 8, 16)
_RECOMPUTE: tuple[RecomputeWord, ...] = (None, "selective", "full")
_TRIALS = 8  # times as long as one prediction the search of the least recomputation takes
_ORDERS = 3  # of the fastest plans are tried under a searched order
_PLACED = 4096  # forwards of the plans that are tried with their weight gradients placed
_FRONT = 0.7  # of the cap: settings that take less are simulated for the front alone
_SLOWER = 2.0  # times the seconds of the soonest: no plan of the front is worth more
_SHARES = ((1.1, 0.3), (0.85, 0.4), (0.65, 0.15), (0.45, 0.1), (0.3, 0.05))
"""(of the cap, of the work): estimates of bytes are up to a third too low, and the front wants plans that take less memory."""


@dataclass(frozen=True)
class SearchSpace:
    """The values among which the search may choose; None: all. `sizes`: by dimension of the mesh; `work`: computations that
    are simulated at most."""

    rows: Sequence[int] = _ROWS
    recompute: Sequence[RecomputeWord] = _RECOMPUTE
    schedules: Sequence[str] | None = None
    sizes: Mapping[str, Collection[int]] = field(default_factory=dict)
    offload: bool = True
    work: int = _WORK


class _Candidate(NamedTuple):
    """A setting with its estimate. `least`: as few of its layers are recomputed as the cap asks for."""

    guess: Estimate
    setting: PlanSetting
    least: bool = False


def find_plans(request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace) -> TrainingPlans:
    """The plans for a request. Raises `NoPlanError` where none fits `cap` bytes, `ScheduleError` where none is simulated."""
    ordered = sorted(_estimated(request, limits, space, cap), key=lambda each: (each.guess, each.least, repr(each.setting)))
    if not ordered:
        raise ScheduleError(_nothing(request, limits, space))
    search = _Search(request, cap, _degrees(request, space))
    fitting = (guess.seconds for guess, *_ in ordered if guess.nbytes <= cap * _SHARES[0][0])
    most = next(fitting, ordered[0].guess.seconds) * _SLOWER
    for share, of_work in _SHARES:
        less = (each for each in ordered if each.guess.nbytes <= cap * share)
        search.work.grant(round(space.work * of_work))
        _simulate(search, (each for each in less if share > _FRONT or each.guess.seconds <= most))
    if not any(each.peak <= cap for each in search.found.values()):
        search.work.grant(round(space.work * _LAST))
        _simulate(search, sorted(ordered, key=lambda each: (each.guess.nbytes, each.guess.seconds)))
    if space.offload:
        search.work.grant(round(space.work * _OFFLOADED))
        _offload(search, ordered)
    if not search.found:
        raise ScheduleError(f"work={space.work:,}: of {len(ordered):,} settings none could be simulated: give more work")
    if space.schedules is None or ORDER in space.schedules:
        _search_orders(search)
    further = sum(bool(each.recomputed or each.schedule.order or each.offload) for each in search.found)  # made on the way
    return ranked(list(search.found.values()), cap, len(ordered) + further, lambda each: _facts(request, each))


def _facts(request: PlanRequest, found: Prediction) -> dict[str, Any]:
    """The fields of a `TrainingPlan` that a prediction does not have."""
    names = request.costs.names
    return {
        "machines": str(request.machines),
        "split": tuple(names[first] for first in found.cut[1:]),
        "recomputed": layer_names(request.costs, found.setting, found.cut),
        "batch": request.batch,
        "tokens": request.tokens,
        "mfu": _mfu(request, found),
        "dtype": request.dtype,
    }


def _offload(search: _Search, ordered: Sequence[_Candidate]) -> None:
    """Add settings with as little offload as fits, the soonest first (where none fits yet, the smallest), that may be best."""
    fitting = [each.seconds.total for each in search.found.values() if each.peak <= search.cap]
    most, promising = min(fitting, default=inf), []
    for guess, setting, least in ordered:
        if not least and guess.seconds < most and not isinstance(setting.recompute, float):
            away = with_offload(search.request, setting, search.known(setting, guess), search.cap)
            if away is not None and away.seconds < most:
                promising.append((away.seconds if fitting else guess.nbytes, repr(setting), setting))
    for *_, setting in sorted(promising, key=lambda each: each[:2]):
        if not search.work.read_again(setting):
            return
        least_setting = least_offload(search.request, setting, search.cap)
        search.add(predict(search.request, least_setting) if least_setting is not None else None)


def _search_orders(search: _Search) -> None:
    """Add the fastest plans that fit under an order of their own, where it is faster than the named schedule.

    Weight gradients alone are placed in more plans: those that would be the best without their idle time.
    """
    fitting = sorted((each for each in search.found.values() if each.peak <= search.cap), key=order)
    for named in fitting[:_ORDERS]:
        search.refine(searched_order, named)
    soonest = min((each.seconds.total for each in search.found.values() if each.peak <= search.cap), default=inf)
    left = _PLACED
    for named in fitting:
        forwards = named.setting.stages * named.setting.microbatches
        if forwards <= left and named.setting.offload is None and named.seconds.total - named.seconds.bubble < soonest:
            search.refine(placed_weight_grads, named)
            left -= forwards


def _degrees(request: PlanRequest, space: SearchSpace) -> list[RecomputeWord]:
    """The kinds of recomputation that may be of some layers only: those beside none, of a model with layers."""
    free = None in space.recompute and bool(request.costs.layers)
    return [word for word in space.recompute if free and word in ("selective", "full")]


def _estimated(request: PlanRequest, limits: MeshLimits, space: SearchSpace, cap: int) -> Iterator[_Candidate]:
    for base in _settings(request, limits, space):
        settings = {word: replace(base, recompute=word) for word in space.recompute}
        guesses = {word: _Candidate(estimate(request, each), each) for word, each in settings.items()}
        yield from guesses.values()
        for word in _degrees(request, space):
            between = _between(guesses[None].guess, guesses[word].guess, cap)
            if between:
                yield _Candidate(between, guesses[word].setting, least=True)


def _between(none: Estimate, most: Estimate, cap: int) -> Estimate | None:
    """The estimate of as much recomputation as a cap asks for; None where it asks for none, or where all is too little."""
    if none.nbytes <= cap or most.nbytes > cap * _SHARES[0][0] or most.nbytes >= none.nbytes:
        return None
    share = min(1.0, (none.nbytes - cap) / (none.nbytes - most.nbytes))
    return Estimate(none.seconds + share * (most.seconds - none.seconds), cap)


def _settings(request: PlanRequest, limits: MeshLimits, space: SearchSpace) -> Iterator[PlanSetting]:
    for shape in mesh_shapes(request.machines.gpus, request.batch, limits):
        if any(getattr(shape, name) not in sizes for name, sizes in space.sizes.items()):
            continue
        for rows in space.rows:
            if request.batch % (shape.data_ranks * rows):
                continue
            microbatches = request.batch // (shape.data_ranks * rows)
            for choice in schedule_choices(shape.pp, microbatches, limits.stages):
                if space.schedules is not None and choice.name not in space.schedules:
                    continue
                for keep in _keeps(shape, choice.stages_per_rank):
                    yield PlanSetting(shape, rows, microbatches, choice, keep)


def _keeps(shape: MeshShape, per_rank: int) -> Iterable[int | None]:
    """How many whole stages a rank may hold: all, half of them, one, or single layers alone."""
    if shape.shards == 1:
        return (None,)
    return (None, *((per_rank // 2,) if per_rank > 3 else ()), *((1,) if per_rank > 1 else ()), 0)


def _simulate(search: _Search, candidates: Iterable[_Candidate]) -> None:
    """Add the predictions of candidates, in their order, until the work is spent."""
    for _, setting, least in candidates:
        if search.work.over:
            return
        if least:
            search.least(setting)
        elif setting not in search.found and search.work.take(setting):
            search.add(predict(search.request, setting))
            known = search.found.get(setting)
            if known is not None and known.peak > search.cap and setting.recompute is None:
                for word in search.words:
                    search.least(replace(setting, recompute=word))


@dataclass
class _Search:
    """The predictions so far. `words`: the kinds of recomputation of which as little as fits may be chosen."""

    request: PlanRequest
    cap: int
    words: Sequence[RecomputeWord]
    work: Work = field(default_factory=Work)
    found: dict[PlanSetting, Prediction] = field(default_factory=dict)
    tried: set[PlanSetting] = field(default_factory=set)

    def add(self, prediction: Prediction | None) -> None:
        if prediction is not None:
            self.found.setdefault(prediction.setting, prediction)

    def refine(self, refined: Callable[[PlanRequest, Prediction, int], Prediction | None], named: Prediction) -> None:
        """Add the refined prediction if it is faster than the named one."""
        found = refined(self.request, named, self.cap)
        if found is not None and rounded(found) < rounded(named):
            self.add(found)

    def known(self, setting: PlanSetting, guess: Estimate) -> Estimate:
        """The seconds and bytes that are predicted for a setting, else those that are estimated."""
        found = self.found.get(setting)
        return guess if found is None else Estimate(found.seconds.total, found.peak)

    def least(self, setting: PlanSetting) -> None:
        """Add the setting with as few recomputed layers as fit."""
        if setting not in self.tried and self.work.take(setting, _TRIALS):
            self.tried.add(setting)
            chosen = least_recompute(self.request, setting, self.cap)
            if chosen is not None and chosen[0] not in self.found:
                self.add(predict(self.request, *chosen))


def _mfu(request: PlanRequest, found: Prediction) -> float:
    """FLOPs of the model in a step, by the peak of all GPUs in its seconds."""
    setting, machines = found.setting, request.machines
    flops = request.priced(setting.shape, setting.rows, setting.recompute).flops
    done = flops * setting.microbatches * setting.shape.data_ranks
    peak = machines.device.peak(request.dtype or request.costs.dtype)
    return done / (found.seconds.total * machines.gpus * peak)


def _nothing(request: PlanRequest, limits: MeshLimits, space: SearchSpace) -> str:
    """Why no setting is left: the limits of the model, the batch and the search space."""
    asked = [f"{name} of {sorted(sizes)}" for name, sizes in space.sizes.items()]
    asked += [f"rows of {sorted(space.rows)}", *([f"schedules of {list(space.schedules)}"] if space.schedules else [])]
    return (
        f"no setting for {request.machines.gpus} GPUs and a batch of {request.batch} rows is left: the model admits up to "
        f"{limits.stages} stages, divisors of {limits.tp} along tp (1 without a tensor_plan=), of {limits.experts} along ep, "
        f"up to {limits.cp} along cp; the search may choose {', '.join(asked)}; data ranks x rows divide the batch"
    )
