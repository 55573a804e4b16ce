"""Cuts for ranks with unlike memory: stages take bytes as their ranks have room, and seconds as far as these bytes allow.

The bytes of a rank at its peak are shared out over its segments: activations by the bytes that the segments save, all others by
those of their parameters and gradients. Other cuts are assumed to add these bytes up; a prediction says whether that was right.
"""

from __future__ import annotations

from itertools import pairwise

from graphpp.cluster_planner.plans.prediction.predict_step import Prediction, order_costs, peaks_of, predict, tables_of
from graphpp.cluster_planner.plans.prediction.single_layers import priced_on, priced_setting
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.planner.balance import balanced_on
from graphpp.planner.segments import Cut

_ROUNDS = 3  # cuts that are tried


def predict_within(request: PlanRequest, setting: PlanSetting, cap: int, cut: Cut | None = None) -> Prediction | None:
    """The prediction of a setting; without a `cut`, on ranks with unlike memory, with a cut that fits if one is found."""
    found = predict(request, setting, cut)
    for _ in range(_ROUNDS if cut is None else 0):
        if found is None or found.over(cap) <= 0:
            break
        following = cut_by_memory(request, setting, found.cut)
        nearer = None if following in (None, found.cut) else predict(request, setting, following)
        if nearer is None or nearer.over(cap) >= found.over(cap):
            break
        found = nearer
    return found


def cut_by_memory(request: PlanRequest, setting: PlanSetting, cut: Cut) -> Cut | None:
    """The cut of a setting by the bytes of its ranks under another cut; None if there is none, or all devices are alike."""
    tables = tables_of(request, setting)
    if tables is None or len(request.machines.groups) == 1 or setting.word_parts:  # parts of words have stages of their own
        return None
    caps, request = request.caps(setting.shape, 0), request.of(setting)
    others, peaks = order_costs(request, setting, cut, tables[-1])[1][0], peaks_of(request, setting, cut, tables)
    priced, homes = priced_setting(request, setting, cut), setting.schedule.homes(setting.shape.pp)
    saved = [float(part.saved_bytes) for part in priced.segments.costs.stages]
    state = [0.0] * len(saved)
    for one in priced.segments.state:
        for segment in one.readers:
            state[segment] += one.weights + one.sums
    held, bounds = list[list[float]](), list(pairwise((*cut, len(saved))))
    for stage, rank in enumerate(homes):
        own = [at for other, (first, end) in enumerate(bounds) if homes[other] == rank for at in range(first, end)]
        kinds = (saved, peaks[rank] - others[rank]), (state, others[rank])
        shares = [(each, nbytes / whole) for each, nbytes in kinds if (whole := sum(each[at] for at in own))]
        nbytes = [sum(share * each[at] for each, share in shares) for at in range(len(saved))]
        room = caps[rank] * sum(nbytes[slice(*bounds[stage])]) / max(1.0, sum(nbytes[at] for at in own))
        held.append([each / max(1.0, room) for each in nbytes])
    groups = request.groups(setting)
    parts = [priced_on(request, setting, cut, group).segments.costs.stages for group in range(len(request.machines.groups))]
    seconds = [[each.forward + each.input_grad + each.weight_grad for each in own] for own in parts]
    return balanced_on(seconds, groups, held)
