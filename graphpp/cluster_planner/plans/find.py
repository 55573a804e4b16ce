"""Search the fastest way to train a model on machines: mesh, microbatch, schedule, `keep`, recomputation and offload.

`estimate.py` orders all settings. `predict_step.py` simulates a part of them: first those with an estimate near the cap, then
those further below it, down to a third of the cap. A count of simulated computations bounds the work, not a clock, so equal
arguments give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any, NamedTuple, TypeVar

from graphpp.cluster_planner.plans.estimate import Estimate, estimate, with_offload
from graphpp.cluster_planner.plans.found_plans import TrainingPlans, ranked
from graphpp.cluster_planner.plans.layouts.fixed import Fixed
from graphpp.cluster_planner.plans.mesh_shapes import MeshLimits, MeshShape
from graphpp.cluster_planner.plans.prediction.error_bars import error_of
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, costs_and_bound, predict
from graphpp.cluster_planner.plans.prediction.read_tables import Work
from graphpp.cluster_planner.plans.prediction.single_layers import layer_names
from graphpp.cluster_planner.plans.refine.cut_by_memory import predict_within
from graphpp.cluster_planner.plans.refine.fastest_plans import move_stages, search_orders
from graphpp.cluster_planner.plans.refine.least_memory import least_offload
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.search import Search
from graphpp.cluster_planner.plans.settings import ORDER, PIECE, PlanSetting, RecomputeWord, ScheduleChoice
from graphpp.devices import Machines
from graphpp.errors import ScheduleError

T = TypeVar("T")
_WORK = 150_000  # simulated computations
_FEW = 15_000  # settings: their tables are alike, and fewer are simulated unless `work` is given
_OFFLOADED = 0.15  # of the work, added for settings that fit by offload
_LAST = 0.25  # of the work, added for the settings with least memory if no plan fits yet
_ROWS = (1, 2, 4, 8, 16)
_RECOMPUTE: tuple[RecomputeWord, ...] = (None, "selective", "full")
_OF_STAGES = ("stages", "stages_per_rank", "split", "recomputed")  # choices of a layout that leave no other stages
_ANY = ScheduleChoice("auto")
_FRONT = 0.7  # of the cap: settings with less memory are simulated only for the time-memory front
_SLOWER = 2.0  # slowdown against the fastest fitting estimate up to which settings are simulated for the front
_SHARES = ((1.1, 0.3), (0.85, 0.4), (0.65, 0.15), (0.45, 0.1), (0.3, 0.05))
"""(share of the cap, share of the work): byte estimates are up to a third too low; the front needs plans with less memory."""


@dataclass(frozen=True)
class SearchSpace:
    """The values that the search may choose. `schedules=None`: all; `sizes`: by mesh dimension, all where absent; `work`: most
    computations to simulate; `fixed`: the choices of a layout."""

    rows: Sequence[int] = _ROWS
    recompute: Sequence[RecomputeWord] = _RECOMPUTE
    schedules: Sequence[str] | None = None
    sizes: Mapping[str, Collection[int]] = field(default_factory=dict)
    offload: bool = True
    work: int = _WORK
    fixed: Fixed = Fixed()


class _Candidate(NamedTuple):
    """A setting with its estimate. `least`: recompute only as many of its layers as the cap requires."""

    guess: Estimate
    setting: PlanSetting
    least: bool = False


def find_plans(request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace) -> TrainingPlans:
    """The plans for a request, on mixed machines for each order of some groups. Raises `NoPlanError` if none fits `cap` bytes,
    `ScheduleError` if none is simulated."""
    searches = on_each_order(request, limits, cap, lambda one, to, most: _named(one, to, most, space))
    _refine(searches, space)
    further = sum(  # added by the search
        bool(each.recomputed or each.schedule.order or each.offload) for search in searches for each in search.found
    )
    found = {id(each): (each, search.request) for search in searches for each in search.found.values()}
    considered = further + sum(search.considered for search in searches)
    return ranked([each for each, _ in found.values()], cap, considered, lambda each: facts_of(found[id(each)][1], each))


def on_each_order(
    request: PlanRequest,
    limits: MeshLimits,
    cap: int,
    search: Callable[[PlanRequest, MeshLimits, int], T],
    *,
    all_of: bool = False,
) -> list[T]:
    """The results of a search on the machines; on mixed machines in each order of some groups, or of all. Raises the first
    `ScheduleError` if no order has a result, and for a device without figures of a dtype."""
    if isinstance(request.machines, Machines):
        return [search(request, limits, cap)]
    found, errors = list[T](), list[ScheduleError]()
    for group in range(len(request.machines.groups)):
        request.priced(MeshShape(), 1, None, group)  # no group stays idle because its device lacks figures of a dtype
    for machines in request.machines.orders(len(request.machines.groups) if all_of else 1):
        try:
            found.append(search(request.on(machines), replace(limits, domain=machines.per_machine), max(machines.caps)))
        except ScheduleError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def searched(request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace) -> Search:
    """The predictions for a request, of which none may fit. Raises `ScheduleError` if there is none."""
    search = _named(request, limits, cap, space)
    _refine([search], space)
    return search


def _refine(searches: Sequence[Search], space: SearchSpace) -> None:
    chosen = space.fixed.values.keys()
    if chosen.isdisjoint(("schedule", "group")) and ORDER in (space.schedules or (ORDER,)):
        search_orders(searches, other_stages=chosen.isdisjoint(_OF_STAGES))


def _named(request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace) -> Search:
    """The predictions with named schedules."""
    ordered = sorted(_estimated(request, limits, space, cap), key=lambda each: (each.guess, each.least, repr(each.setting)))
    if not ordered:
        raise ScheduleError(_nothing(request, limits, space))
    work = Work(len(ordered) < _FEW and space.work == _WORK)
    search = Search(request, cap, _degrees(request, space), space.fixed.cut, len(ordered), work)
    fitting = (guess.seconds for guess, *_ in ordered if guess.nbytes <= cap * _SHARES[0][0])
    most = next(fitting, ordered[0].guess.seconds) * _SLOWER
    for share, of_work in _SHARES:
        less = (each for each in ordered if each.guess.nbytes <= cap * share)
        search.work.grant(round(space.work * of_work))
        _simulate(search, (each for each in less if share > _FRONT or each.guess.seconds <= most))
    if not any(each.over(cap) <= 0 for each in search.found.values()):
        search.work.grant(round(space.work * _LAST))
        _simulate(search, sorted(ordered, key=lambda each: (each.guess.nbytes, each.guess.seconds)))
    if space.offload and space.fixed.cut is None:
        search.work.grant(round(space.work * _OFFLOADED))
        _offload(search, ordered)
    if not search.found:
        raise ScheduleError(f"work={space.work:,}: of {len(ordered):,} settings none could be simulated: give more work")
    if space.fixed == Fixed():  # a layout is priced with its own cut, or the most balanced one
        move_stages(search)
    return search


def facts_of(request: PlanRequest, found: Prediction) -> dict[str, Any]:
    """The fields of a `TrainingPlan` that its prediction lacks."""
    request = request.of(found.setting)
    names, devices = request.costs.names, [each.device.name for each in request.machines.groups]
    of_ranks = request.groups_of_ranks(found.setting.shape)
    kind = bool(request.costs.expert_ranks), found.setting.shape.pp > 1
    costs, bound = costs_and_bound(request, found.setting, found.cut)
    return {
        "machines": str(request.machines),
        "split": tuple(names[first] for first in found.cut[1:]),
        "recomputed": layer_names(request.costs, found.setting, found.cut),
        "batch": request.batch,
        "tokens": request.tokens,
        **_utilizations(request, found),
        **({} if isinstance(request.machines, Machines) else {"devices": tuple(devices[each] for each in of_ranks)}),
        "error": error_of(devices[0], *kind) if len(devices) == 1 else None,
        "dtype": request.dtype,
        "float8": request.costs.float8,
        "costs": costs,
        "bound": bound,
    }


def _offload(search: Search, ordered: Sequence[_Candidate]) -> None:
    """Add settings with the least offload that fits, in the machines' memory too, and may beat the best plan, the fastest first
    (the smallest if none fits)."""
    fitting = [each.seconds.total for each in search.found.values() if each.over(search.cap) <= 0]
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
        found = predict(search.request, least_setting) if least_setting is not None else None
        search.add(found if found is not None and found.host <= search.request.machines.host_memory else None)


def _degrees(request: PlanRequest, space: SearchSpace) -> list[RecomputeWord]:
    """The kinds of recomputation that may apply to some layers only."""
    free = None in space.recompute and bool(request.costs.layers) and space.fixed.cut is None
    return [word for word in space.recompute if free and word in ("selective", "full")]


def _estimated(request: PlanRequest, limits: MeshLimits, space: SearchSpace, cap: int) -> Iterator[_Candidate]:
    for base in _settings(request, limits, space, cap):
        settings = {word: replace(base, recompute=word) for word in space.recompute}
        if space.fixed.values:
            settings = {word: space.fixed.remembered(request, each) for word, each in settings.items()}
        guesses = {word: _Candidate(estimate(request, each), each) for word, each in settings.items()}
        yield from guesses.values()
        for word in _degrees(request, space):
            between = _between(guesses[None].guess, guesses[word].guess, cap)
            if between:
                yield _Candidate(between, guesses[word].setting, least=True)


def _between(none: Estimate, most: Estimate, cap: int) -> Estimate | None:
    """The estimate of the least recomputation within a cap; None if none is needed, or if all layers are not enough."""
    if none.nbytes <= cap or most.nbytes > cap * _SHARES[0][0] or most.nbytes >= none.nbytes:
        return None
    share = min(1.0, (none.nbytes - cap) / (none.nbytes - most.nbytes))
    return Estimate(none.seconds + share * (most.seconds - none.seconds), cap)


def _settings(request: PlanRequest, limits: MeshLimits, space: SearchSpace, cap: int) -> Iterator[PlanSetting]:
    fixed = space.fixed
    for shape in filter(fixed.admits, request.shapes(limits, fixed.sizes)):
        if any(getattr(shape, name) not in sizes for name, sizes in space.sizes.items()):
            continue
        for rows, microbatches in rows_of(request, shape, space):
            for words in fixed.among("word_parts", (False, True)):
                base = PlanSetting(shape, rows, microbatches, _ANY, word_parts=words)
                for choice in _schedules(request, limits, space, base):
                    pieces = () if words or not request.may_take_pieces(shape, rows, cap) else (PIECE,)
                    keeps = fixed.among("keep", _keeps(shape, choice.stages_per_rank))
                    for keep, tokens in product(keeps, fixed.among("logits_tokens", (None, *pieces))):
                        setting = PlanSetting(shape, rows, microbatches, choice, keep, word_parts=words, logits_tokens=tokens)
                        if (keep is None or shape.shards > 1) and (tokens is None or request.can_take_pieces(setting)):
                            yield setting


def rows_of(request: PlanRequest, shape: MeshShape, space: SearchSpace) -> Iterator[tuple[int, int]]:
    """The rows and the number of microbatches that make the batch."""
    own = request.batch // shape.data_ranks
    many = space.fixed.values.get("microbatches")
    for rows in space.fixed.among("rows", space.rows if many is None else (own // many,)):
        if rows and own % rows == 0 and many in (None, own // rows):
            yield rows, own // rows


def _schedules(
    request: PlanRequest, limits: MeshLimits, space: SearchSpace, base: PlanSetting
) -> Iterator[ScheduleChoice]:
    """The schedules for a setting with any schedule."""
    most = limits.stages + (request.stages_of_words(base.shape) if base.word_parts else 0)
    for choice in space.fixed.schedules(space.schedules, base.shape.pp, base.microbatches, most):
        stages = choice.stages_on(base.shape.pp)
        asked = "word_parts" in space.fixed.values and request.can_cut_words(base.shape, stages)
        if not base.word_parts or asked or request.may_cut_words(base.shape, base.rows, stages):
            yield choice


def _keeps(shape: MeshShape, per_rank: int) -> Sequence[int | None]:
    """The values of `keep`: all whole stages, half of them, one, or single layers only (0)."""
    if shape.shards == 1:
        return (None,)
    return (None, *((per_rank // 2,) if per_rank > 3 else ()), *((1,) if per_rank > 1 else ()), 0)


def _simulate(search: Search, candidates: Iterable[_Candidate]) -> None:
    """Predict candidates in order until the work is spent."""
    for _, setting, least in candidates:
        if search.work.over:
            return
        if least:
            search.least(setting)
        elif setting not in search.found and search.work.take(setting):
            search.add(known := predict_within(search.request, setting, search.cap, search.cut))
            if known is not None and known.over(search.cap) > 0 and setting.recompute is None:
                for word in search.words:
                    search.least(replace(setting, recompute=word))


def _utilizations(request: PlanRequest, found: Prediction) -> dict[str, float]:
    setting, machines = found.setting, request.machines
    again, plain = (request.priced(setting.shape, setting.rows, each) for each in (setting.recompute, None))
    layers = 1.0 if setting.recomputed is None else sum(setting.recomputed) / len(request.costs.layers)
    executed = plain.executed + layers * (again.executed - plain.executed)
    dtype = request.dtype or request.costs.dtype
    peaks = sum(found.seconds.total * each.gpus * each.device.peak(dtype) for each in machines.groups)
    times = setting.microbatches * setting.shape.data_ranks / peaks
    return {"mfu": times * plain.flops, "hfu": times * executed}


def _nothing(request: PlanRequest, limits: MeshLimits, space: SearchSpace) -> str:
    asked = [f"{name} of {sorted(sizes)}" for name, sizes in space.sizes.items()]
    asked += [f"rows of {sorted(space.rows)}", *([f"schedules of {list(space.schedules)}"] if space.schedules else [])]
    groups = f", and the GPUs of a pipeline rank each group of {request.machines}" if len(request.machines.groups) > 1 else ""
    return (
        f"no setting for {request.machines.gpus} GPUs and a batch of {request.batch} rows is left: the model admits up to "
        f"{limits.stages} stages, divisors of {limits.tp} along tp (1 without a tensor_plan=), of {limits.experts} along ep, "
        f"up to {limits.cp} along cp; the search may choose {', '.join(asked)}; data ranks x rows divide the batch{groups}"
    )
