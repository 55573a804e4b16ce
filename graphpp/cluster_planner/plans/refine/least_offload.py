"""The least offload that fits: the smallest fraction of the saved bytes that has to wait in the host's memory.

Contract
    in   a `Question`, a setting without offload, the bytes that a rank may hold
    out  the setting with the least fraction, in eighths, under which every rank fits; the setting itself where it fits; None
         where not even all values are enough, and where the device has no link to the host

A larger fraction takes along the values of a smaller one, so the bytes of no rank grow with it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from graphpp.cluster_planner.plans.predict import peaks_of, tables_of
from graphpp.cluster_planner.plans.question import Question
from graphpp.cluster_planner.plans.settings import Setting

_STEPS = 8  # of the fraction


def least_offload(question: Question, setting: Setting, cap: int) -> Setting | None:
    """The setting with the least offload within `cap` bytes."""
    tables = tables_of(question, setting)
    if tables is None or question.machines.device.host is None:
        return None
    cut = question.stages(setting).cut

    def offloading(step: int) -> Setting:
        return replace(setting, offload=step / _STEPS if step else None)

    def fits(step: int) -> bool:
        return max(peaks_of(question, offloading(step), cut, tables)) <= cap

    if not fits(_STEPS):
        return None
    return offloading(bisect_left(range(_STEPS), True, key=fits))
