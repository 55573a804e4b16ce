"""Where to cut: every form `split=` takes, turned into the first operation of each stage.

Contract
    in   a split in the user's words, and the module calls of the captured forward in order of execution
    out  S positions, never falling, the first 0: stage s owns the forward operations `starts[s]` up to `starts[s + 1]`
         (the last stage: to the end). Equal neighbours are an empty stage, which only an explicit wish makes.
    else `SplitError`; the calls are not changed

A stage starts right before a module call. What runs between two calls (a residual add, a mask) stays with the
earlier stage. Forms: FQNs of the modules that start stages 1.. (`split_points` makes them), one list of FQNs per
stage, a number of stages, None (that number comes from the schedule), or an object with `starts(calls)` (`Layout`).
"""

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Protocol, TypeAlias, runtime_checkable

from graphpp.errors import SplitError


@dataclass(frozen=True)
class Call:
    """One call of a module: its forward operations are `position` up to, not including, `end`."""

    fqn: str  # `layers.3`; the second call of the same module is `layers.3@1`
    position: int
    end: int

    @property
    def module(self) -> str:
        """The FQN without the number of the call."""
        return re.sub(r"@\d+$", "", self.fqn)


@runtime_checkable
class Splitter(Protocol):
    """Anything that finds the stages itself, by the contract of this file. `Layout` is one."""

    def starts(self, calls: Sequence[Call]) -> tuple[int, ...]:
        """The first operation of each stage."""
        ...


Split: TypeAlias = int | Sequence[str] | Sequence[Sequence[str]] | Splitter | None

_START = "the start"  # stands for a call, at position 0, of what runs first


def split_points(
    num_layers: int, num_stages: int, input_weight: float = 1, output_weight: float = 1, *, layer: str = "layers.{}"
) -> list[str]:
    """The `num_stages - 1` FQNs `layers.k` before which a stage starts, so that all stages weigh about the same.

    What runs before the layers weighs as much as `input_weight` layers, what runs after them as `output_weight`.
    Every stage gets a layer, however heavy the ends are. What does not divide goes to the middle stages first,
    then to the first, so the ends are lightest. `layer` is the FQN with `{}` for the number.
    Raises SplitError where no such split exists. The idea is torchtitan's `generate_split_points`.
    """
    if "{}" not in layer:
        raise SplitError(f"layer={layer!r} does not say where the number goes: write it like 'layers.{{}}'")
    return [layer.format(k) for k in _first_layers(num_layers, num_stages, input_weight, output_weight)[1:]]


def resolve(
    split: Split, calls: Sequence[Call], num_stages: int | None = None, known: Collection[str] = ()
) -> tuple[int, ...]:
    """The first operation of each stage, stage 0 at 0.

    `calls` come in order of execution, parents before children. `num_stages` is what schedule and ranks ask for,
    if they do. `known` holds the FQNs of all modules, so that an error can tell a module that is never called
    from one that does not exist. Raises SplitError; the message names the module or the stage, and what fits.
    """
    if isinstance(split, str):
        raise SplitError(f"split={split!r} is a string: write graphpp.Layout({split!r}) or a list of FQNs")
    if split is None or isinstance(split, int):
        starts = _equal_layers(split, calls, num_stages)
    elif isinstance(split, Splitter):
        starts = split.starts(calls)
    else:
        starts = _listed(_by_stage(split), calls, known)
    if num_stages is not None and len(starts) != num_stages:
        raise SplitError(f"split= makes {_some(len(starts), 'stage')}, schedule and ranks ask for {num_stages}")
    return starts


def check_stages(starts: Sequence[int], names: Sequence[str], asked: Collection[int] = ()) -> None:
    """Raise SplitError unless the stages run in order and none is empty but those that were `asked` to be.

    `names[s]` says what starts stage s.
    """
    for stage, (start, end) in enumerate(pairwise(starts)):
        if start > end:
            raise SplitError(f"out of execution order: {names[stage + 1]} runs before {names[stage]}")
        if start == end and stage not in asked:
            raise SplitError(
                f"stage {stage} would be empty: no operation runs between {names[stage]} and {names[stage + 1]}"
            )


def repeated_layers(calls: Sequence[Call]) -> list[Call]:
    """The calls that are the model's layers, in order of execution, whatever they are named. Empty: there are none.

    Layers are siblings `<prefix>.<integer>`, or the calls of one shared module. Of the families that cover nearly
    as many operations as the widest, the longest are the layers; others that run before or after and are not much
    smaller per call (an encoder beside a decoder) are joined to them. Together they are a quarter of the forward.
    """
    families = sorted(_families(calls), key=_covered, reverse=True)
    wide = [family for family in families if 3 * _covered(family) >= 2 * _covered(families[0])]
    chosen = [max(wide, key=len)] if wide else []
    for family in families:
        alike = 4 * _covered(family) * len(chosen[0]) >= _covered(chosen[0]) * len(family)
        if alike and all(_apart(family, other) for other in chosen):
            chosen.append(family)
    layers = sorted(chain(*chosen), key=lambda call: call.position)
    return layers if 4 * _covered(layers) >= max((call.end for call in calls), default=0) else []


# ------------------------------------------------------------------------------------------ equal numbers of layers


def _first_layers(num_layers: int, num_stages: int, input_weight: float, output_weight: float) -> list[int]:
    """The number of the first layer of every stage."""
    if num_stages < 1:
        raise SplitError(f"there is at least 1 stage, not {num_stages}")
    if num_layers < num_stages:
        raise SplitError(f"{_some(num_layers, 'layer')} cannot fill {num_stages} stages: at most {num_layers} fit")
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


def _equal_layers(split: int | None, calls: Sequence[Call], num_stages: int | None) -> tuple[int, ...]:
    """Stages of equally many layers; no layers are needed for one stage."""
    wanted = num_stages if split is None else split
    if wanted is None or isinstance(wanted, bool) or wanted < 1:
        raise SplitError(f"split={split} does not say how many stages there are: give a number of 1 or more, or FQNs")
    layers = repeated_layers(calls) if wanted > 1 else []
    if wanted > max(1, len(layers)):
        found = f"{_some(len(layers), 'repeated layer')}{_listing([call.fqn for call in layers], ': ')}"
        raise SplitError(
            f"{wanted} stages of equal numbers of layers do not fit: the model has {found}. "
            f"Ask for at most {max(1, len(layers))}, or list the FQNs of other modules to cut before"
        )
    first = _first_layers(max(wanted, len(layers)), wanted, 0, 0)
    return (0, *(layers[k].position for k in first[1:]))


def _families(calls: Sequence[Call]) -> list[list[Call]]:
    """Calls that may be layers of one another; none is empty or inside another of its family."""
    families: dict[str, list[Call]] = {}
    for call in calls:
        prefix, _, last = call.module.rpartition(".")
        family = families.setdefault(f"{prefix}.*" if last.isdecimal() else call.module, [])
        if call.end > call.position >= (family[-1].end if family else 0):
            family.append(call)
    return [family for name, family in families.items() if len(family) > 1 or (family and name.endswith(".*"))]


def _covered(family: Iterable[Call]) -> int:
    """The number of operations in these calls."""
    return sum(call.end - call.position for call in family)


def _apart(one: Sequence[Call], other: Sequence[Call]) -> bool:
    """Whether one family runs wholly before the other."""
    return one[-1].end <= other[0].position or other[-1].end <= one[0].position


# ------------------------------------------------------------------------------------------------------- listed FQNs


def _by_stage(split: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """The names that each stage must hold; the first stage that is not empty holds the start."""
    if not isinstance(split, Sequence):
        raise SplitError(f"split= takes a number, FQNs, lists of FQNs or a Layout, not {type(split).__name__}")
    names = [name for name in split if isinstance(name, str)]
    if len(names) == len(split):
        return [[_START], *([name] for name in names)]
    stages = [list(stage) for stage in split if isinstance(stage, Sequence) and not isinstance(stage, str)]
    if len(stages) < len(split) or not all(isinstance(name, str) for stage in stages for name in stage):
        raise SplitError(f"split={split!r} mixes forms: give FQNs only, or one list of FQNs for each stage")
    if not stages[-1]:
        raise SplitError(f"stage {len(stages) - 1}, the last, cannot be empty: the loss is computed there")
    next(filter(None, stages)).insert(0, _START)
    return stages


def _listed(stages: Sequence[Sequence[str]], calls: Sequence[Call], known: Collection[str]) -> tuple[int, ...]:
    """Each stage starts at the first call it lists, an empty one where the next one starts."""
    calls = [Call(_START, 0, 0), *calls]
    where = {call.fqn: index for index, call in enumerate(calls)}
    owner: dict[str, int] = {}
    for stage, name in ((stage, name) for stage, names in enumerate(stages) for name in names):
        if name not in where:
            raise SplitError(_unknown(name, calls[1:], known))
        if name in owner:
            raise SplitError(f"{name!r} is listed twice (a later call of the same module has a name like 'fqn@1')")
        owner[name] = stage
    _check_order(sorted(owner, key=where.__getitem__), owner)
    heads: list[Call] = []
    for names in reversed(stages):
        heads.insert(0, calls[min(where[name] for name in names)] if names else heads[0])
    starts = tuple(head.position for head in heads)
    asked = {stage for stage, names in enumerate(stages) if not names}
    check_stages(starts, [head.fqn for head in heads], asked)
    for name, stage in owner.items():
        if calls[where[name]].position >= [*starts, sys.maxsize][stage + 1]:
            raise SplitError(f"{name!r}, listed for stage {stage}, starts together with {heads[stage + 1].fqn!r}")
    return starts


def _check_order(names: Sequence[str], owner: dict[str, int]) -> None:
    """Raise SplitError unless the stages of `names`, which come in order of execution, never fall."""
    for at, (before, name) in enumerate(pairwise(names), start=1):
        if owner[before] > owner[name]:
            raise SplitError(
                f"out of execution order: {name!r}, listed for stage {owner[name]}, runs after {before!r}, "
                f"listed for stage {owner[before]}. They run in this order: {_listing(names[max(0, at - 4) :])}"
            )


def _unknown(name: str, calls: Sequence[Call], known: Collection[str]) -> str:
    """Why no call has this name, and which names come near."""
    module = re.sub(r"@\d+$", "", name)
    times = [call.fqn for call in calls if call.module == module]
    inside = [call.fqn for call in calls if call.fqn.startswith(f"{name}.")]
    if times:
        return f"{name!r}: {module!r} is called {_some(len(times), 'time')}{_listing(times, ': ')}"
    if inside:
        return f"{name!r} is never called itself; modules inside it are: {_listing(inside)}"
    names = [*dict.fromkeys([*(call.fqn for call in calls), *known])]
    near = _listing([repr(other) for other in difflib.get_close_matches(name, names, cutoff=0.4)], "; nearest: ")
    if module in known:
        return f"{name!r} exists, but the forward never calls it, or it does nothing there{near}"
    return f"the model has no module {name!r}{near}"


def _listing(names: Sequence[str], lead: str = "") -> str:
    """At most eight names, after `lead`; the empty string for none."""
    shown = ", ".join(names if len(names) <= 8 else [*names[:6], "...", names[-1]])
    return lead + shown if names else ""


def _some(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
