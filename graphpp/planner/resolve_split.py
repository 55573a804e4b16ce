"""Resolve a split: every form of `split=` becomes the first operation of each stage.

Contract
    in   a split as the user gave it, and the module calls of the captured forward in execution order
    out  S non-decreasing positions, the first 0: stage s owns the forward operations `starts[s]` up to `starts[s + 1]` (the
         last stage: to the end). Equal neighbours are an empty stage, which only a split that lists it makes
    Raises `SplitError`. The calls are not changed.

A stage starts right before a module call. Operations between two calls (a residual add, a mask) stay in the earlier stage.
Forms: FQNs of the modules that start stages 1.. (as from `split_points`), one list of FQNs per stage, a number of stages, None
(the schedule gives the number), or an object with `starts(calls)` (`Layout`). Spaces around a name are ignored.
"""

import operator
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import SupportsIndex

from graphpp.arguments import COUNT, INTEGER, NUMBER, TEXT, Accepted, callback, checked, shown, type_name
from graphpp.errors import SplitError
from graphpp.options.split import ModuleCall, Split, Splitter
from graphpp.planner.layers import repeated_layers
from graphpp.planner.split_by_name import START, listed_starts, listing, some


def resolve(
    split: Split, calls: Sequence[ModuleCall], num_stages: int | None = None, known: Collection[str] = ()
) -> tuple[int, ...]:
    """The first operation of each stage, stage 0 at 0.

    `calls`: in execution order, parents before children. `num_stages`: required by schedule and ranks; None if the split
    decides. `known`: FQNs of all modules, so that errors distinguish a module that is never called from one that does not
    exist. Raises `SplitError`, whose message names the faulty module or stage and an accepted value.
    """
    if isinstance(split, str):
        raise SplitError(
            f'split={split!r} is a string: write graphpp.Layout({split!r}), [{split!r}] if it is an FQN, or "auto"'
        )
    if isinstance(split, Splitter):
        starts = _found(split, calls)
    elif isinstance(split, Sequence):
        starts = listed_starts(_by_stage(split), calls, known)
    else:
        starts = equal_layers(_number(split, num_stages), calls)
    if num_stages is not None and len(starts) != num_stages:
        raise SplitError(f"split= makes {some(len(starts), 'stage')}, schedule and ranks ask for {num_stages}")
    return starts


_STARTS = Accepted(
    "the position of the first operation of each stage, in a list of integers",
    lambda value: isinstance(value, Sequence) and all(map(INTEGER.accepts, value)),
)


def _found(splitter: Splitter, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """The splitter's stage starts: first 0, non-decreasing, within the forward. Raises `SplitError`."""
    starts = tuple(callback(SplitError, "split", _STARTS, splitter.starts)(calls))
    end = max((call.end for call in calls), default=0)
    if not starts or starts[0] != 0 or starts[-1] > end or any(start > later for start, later in pairwise(starts)):
        raise SplitError(
            f"{type(splitter).__name__}.starts gave {starts}: it must give the first operation of each stage, "
            f"from 0 up to at most {end}, and never fall"
        )
    return starts


def _by_stage(split: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """The names listed for each stage; the first non-empty stage also gets `START`."""
    names = [name.strip() for name in split if isinstance(name, str)]
    if len(names) == len(split):
        return [[START], *([name] for name in names)]
    stages = [list(stage) for stage in split if isinstance(stage, Sequence) and not isinstance(stage, str)]
    if len(stages) < len(split) or not all(isinstance(name, str) for stage in stages for name in stage):
        raise SplitError(f"split={shown(split)} mixes forms: give FQNs only, or one list of FQNs for each stage")
    if not stages[-1]:
        raise SplitError(f"stage {len(stages) - 1}, the last, cannot be empty: the loss is computed there")
    stages = [[name.strip() for name in stage] for stage in stages]
    next(filter(None, stages)).insert(0, START)
    return stages


# ------------------------------------------------------------------------------------------ equal numbers of layers


_MOST_LAYERS = 2**12


@checked(SplitError, num_layers=COUNT, num_stages=COUNT, input_weight=NUMBER, output_weight=NUMBER, layer=TEXT)
def split_points(
    num_layers: int, num_stages: int, input_weight: float = 1, output_weight: float = 1, *, layer: str = "layers.{}"
) -> list[str]:
    """The `num_stages - 1` FQNs `layers.k` before which a stage starts, so that stages weigh about the same.

    The operations before the first layer weigh as much as `input_weight` layers, those after the last layer as much as
    `output_weight`. Every stage gets at least one layer. Layers left over go to the middle stages first, then to the first
    stage. `layer`: the FQN with `{}` for the number. Raises `SplitError` if there is no such split. The idea is torchtitan's
    `generate_split_points`.
    """
    if layer.count("{}") != 1 or layer.count("{") != 1 or layer.count("}") != 1:
        raise SplitError(f"layer={layer!r} does not say where the number goes: write it like 'layers.{{}}'")
    return [layer.format(k) for k in _first_layers(num_layers, num_stages, input_weight, output_weight)[1:]]


def _first_layers(num_layers: int, num_stages: int, input_weight: float, output_weight: float) -> list[int]:
    if num_stages < 1:
        raise SplitError(f"there is at least 1 stage, not {num_stages}")
    if num_layers < num_stages:
        raise SplitError(f"{some(num_layers, 'layer')} cannot fill {num_stages} stages: at most {num_layers} fit")
    if num_layers > _MOST_LAYERS:
        raise SplitError(f"num_layers={num_layers:,} is more than any model has: take at most {_MOST_LAYERS:,}")
    if not (0 <= input_weight < float("inf") and 0 <= output_weight < float("inf")):
        raise SplitError(f"input_weight={input_weight} and output_weight={output_weight} must be 0 or more layers")
    counts = [1] * num_stages
    loads = [1.0] * num_stages
    loads[0] += input_weight
    loads[-1] += output_weight
    middle_first = [*range(1, num_stages - 1), 0, num_stages - 1]
    for _ in range(num_layers - num_stages):
        lightest = min(middle_first, key=loads.__getitem__)
        counts[lightest] += 1
        loads[lightest] += 1
    return [sum(counts[:stage]) for stage in range(num_stages)]


def _number(split: SupportsIndex | None, num_stages: int | None) -> int:
    wanted = num_stages if split is None else split
    if wanted is None:
        raise SplitError("split=None does not say how many stages there are: give a number of 1 or more, or FQNs")
    try:
        number = operator.index(wanted)
    except TypeError:
        forms = "an int, a list of FQNs, a list of lists of FQNs, or a Layout"
        raise SplitError(f"split= takes {forms}, not {type_name(wanted)}") from None
    if isinstance(wanted, bool) or number < 1:
        raise SplitError(f"split={wanted} does not say how many stages there are: give a number of 1 or more, or FQNs")
    return number


def equal_layers(wanted: int, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """Stages of equal numbers of layers; one stage needs no layers."""
    layers = repeated_layers(calls) if wanted > 1 else []
    if wanted > max(1, len(layers)):
        found = f"{some(len(layers), 'repeated layer')}{listing([call.fqn for call in layers], ': ')}"
        raise SplitError(
            f"{wanted} stages of equal numbers of layers do not fit: the model has {found}. "
            f"Ask for at most {max(1, len(layers))}, or list the FQNs of other modules to cut before"
        )
    first = _first_layers(max(wanted, len(layers)), wanted, 0, 0)
    return (0, *(layers[k].position for k in first[1:]))
