"""Statistics of predictions beside published runs, for `published.py`.

By group of runs: bias, median and 90th percentile of the absolute errors, and Kendall's tau of the utilisations, whose order
does not follow from the sizes of the models alone; once more over the pairs of runs that differ by more than their noise. By
set of runs that differ in their layout or overlaps: how much slower, as published, the one is that is predicted to be fastest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING

from graphpp.cluster_planner.plans.prediction.error_bars import kind_of

if TYPE_CHECKING:
    from published import Compared

NOISE = 0.03  # runs that differ by less have no order: a system measures the same settings 1 to 3 % apart in two releases


def tau(pairs: Sequence[tuple[float, float]], noise: float = 0.0) -> float:
    """Kendall's tau-a: pairs in the same order less pairs in the other one, over all; nan for fewer than two. Leaves out pairs
    whose first numbers differ by less than the fraction `noise` of the smaller one."""
    apart = [each for each in combinations(pairs, 2) if abs(each[0][0] - each[1][0]) >= noise * min(each[0][0], each[1][0])]
    signs = [(one[0] - other[0]) * (one[1] - other[1]) for one, other in apart]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs) if signs else float("nan")


def summary(group: str, found: Iterable[Compared]) -> tuple[str, ...]:
    known = [each for each in found if each.run.tokens is not None]
    errors = [each.error for each in known]
    sizes = sorted(map(abs, errors))
    ninth = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    order = [((each.run.tokens or 0.0) * each.per_peak, each.rate * each.per_peak) for each in known]
    taus = (f"{tau(order, noise):+.2f}" for noise in (0.0, NOISE))
    return (group, str(len(known)), f"{mean(errors):+.0%}", f"{median(sizes):.0%}", f"{ninth:.0%}", *taus)


def error_bars(found: Iterable[Compared]) -> Iterator[tuple[str, str, str]]:
    """By kind of training, the number of runs and the 10th and 90th percentile of published over predicted seconds: the figures
    of `graphpp/cluster_planner/plans/prediction/error_bars.py`."""
    kinds = defaultdict[str, list[float]](list)
    for each in found:
        if each.run.tokens is not None:
            kinds[kind_of(bool(each.run.architecture.experts), each.run.settings.pp > 1)].append(1 + each.error)
    for kind, ratios in sorted(kinds.items()):
        tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
        yield kind, str(len(ratios)), f"{tenths[0]:.2f} to {tenths[-1]:.2f}"


def choices(found: Iterable[Compared]) -> Iterator[tuple[str, ...]]:
    """The sets of runs with equal model, machines, batch and kernels, and unlike layouts, schedules, recomputation or overlaps:
    the run that is predicted to be fastest, the one that is fastest as published, and the share that the first is slower."""
    sets: defaultdict[tuple[object, ...], list[Compared]] = defaultdict(list)
    for each in found:
        it, own = each.run, each.run.settings
        if it.tokens is not None:
            key = (it.group, it.architecture, it.machines, own.batch, own.length, own.precision, own.kernels, own.attention)
            sets[key].append(each)
    for runs in sets.values():
        if len({each.run.settings for each in runs}) > 1:
            picked, fastest = (max(runs, key=rate) for rate in (lambda each: each.rate, lambda each: each.run.tokens or 0.0))
            lost = 1 - (picked.run.tokens or 0.0) / (fastest.run.tokens or 1.0)
            yield f"{picked.run.model}, {picked.run.machines.gpus} {picked.run.machines.device}", str(len(runs)), *(
                each.run.name for each in (picked, fastest)
            ), f"{lost:.0%}"
