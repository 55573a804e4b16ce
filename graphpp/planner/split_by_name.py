"""Resolve stages that are listed by name: FQNs of module calls become the first operation of each stage.

Contract
    in   for each stage, the names of calls that it must contain (`START`: the operations before the first module call), and the
         calls in execution order. The last stage has a name
    out  the first operation of each stage (see `graphpp.planner.resolve_split`): a stage starts at the first call that it lists
         and contains all its listed calls; a stage without names is empty. Unlisted calls follow the execution order
    Raises `SplitError` with the wrong name and the nearest valid names.
"""

import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from graphpp.errors import SplitError
from graphpp.options.split import ModuleCall

START = "the start"  # a pseudo call at position 0


def listed_starts(stages: Sequence[Sequence[str]], calls: Sequence[ModuleCall], known: Collection[str]) -> tuple[int, ...]:
    """The first operation of each stage. `known`: FQNs of all modules, called or not."""
    named = {call.fqn: call for call in (ModuleCall(START, 0, 0), *calls)}
    owner = _owners(stages, named, known)
    in_order = [name for name in named if name in owner]
    _check_order(in_order, owner)
    first = {owner[name]: named[name] for name in reversed(in_order)}
    heads = [first[min(other for other in first if other >= stage)] for stage in range(len(stages))]
    starts = tuple(head.position for head in heads)
    check_stages(starts, [head.fqn for head in heads], [stage for stage, names in enumerate(stages) if not names])
    for name, stage in owner.items():
        if named[name].position >= [*starts, sys.maxsize][stage + 1]:
            together = f"{name!r}, listed for stage {stage}, starts together with {heads[stage + 1].fqn!r}"
            raise SplitError(f"{together}: list both for one stage")
    return starts


def check_stages(starts: Sequence[int], names: Sequence[str], asked: Collection[int] = ()) -> None:
    """Raise `SplitError` unless stages run in order and only the stages in `asked` are empty. `names[s]`: the call that starts
    stage s."""
    for stage, (start, end) in enumerate(pairwise(starts)):
        if start > end:
            raise SplitError(f"out of execution order: {names[stage + 1]} runs before {names[stage]}")
        if start == end and stage not in asked:
            raise SplitError(
                f"stage {stage} would be empty: no operation runs between {names[stage]} and {names[stage + 1]}; "
                "do not cut between them"
            )


def listing(names: Sequence[str], lead: str = "") -> str:
    """At most eight names, after `lead`; "" if there are none."""
    shown = ", ".join(names if len(names) <= 8 else [*names[:6], "...", names[-1]])
    return lead + shown if names else ""


def some(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _owners(stages: Sequence[Sequence[str]], named: Mapping[str, ModuleCall], known: Collection[str]) -> dict[str, int]:
    """Name -> the stage that lists it."""
    owner: dict[str, int] = {}
    for stage, name in ((stage, name) for stage, names in enumerate(stages) for name in names):
        if name not in named:
            raise SplitError(_unknown(name, [call for call in named.values() if call.fqn != START], known))
        if name in owner:
            raise SplitError(f"{name!r} is listed twice (a later call of the same module has a name like 'fqn@1')")
        owner[name] = stage
    return owner


def _check_order(names: Sequence[str], owner: dict[str, int]) -> None:
    """Raise `SplitError` unless the stages of `names`, given in execution order, are non-decreasing."""
    for at, (before, name) in enumerate(pairwise(names), start=1):
        if owner[before] > owner[name]:
            raise SplitError(
                f"out of execution order: {name!r}, listed for stage {owner[name]}, runs after {before!r}, "
                f"listed for stage {owner[before]}. They run in this order: {listing(names[max(0, at - 4) :])}"
            )


def _unknown(name: str, calls: Sequence[ModuleCall], known: Collection[str]) -> str:
    """The message for a name that no call has: the reason, and the nearest names."""
    module = ModuleCall(name, 0, 0).module
    times = [call.fqn for call in calls if call.module == module]
    inside = [call.fqn for call in calls if call.fqn.startswith(f"{name}.")]
    if not name:
        return "a name is empty, which would be the whole model: name a module inside it, or leave it out"
    if times:
        return f"{name!r}: {module!r} is called {some(len(times), 'time')}{listing(times, ': ')}"
    if inside:
        return f"{name!r} is never called itself; modules inside it are: {listing(inside)}: name one of these"
    if module in known:
        return (
            f"{name!r} exists, but the forward never calls it (under this name), or it does nothing there (like "
            "nn.Identity, or nn.Dropout in evaluation): leave it out, or name a module that runs"
            f"{_nearest(name, calls)}"
        )
    return f"the model has no module {name!r}{_nearest(name, calls)}"


def _nearest(name: str, calls: Sequence[ModuleCall]) -> str:
    """Calls with similar names; first those that differ only by a prefix such as `model.`."""
    names = list(dict.fromkeys(call.fqn for call in calls if call.fqn))
    same = [fqn for fqn in names if f".{name}".endswith(f".{fqn}") or f".{fqn}".endswith(f".{name}")]
    same.sort(key=lambda fqn: abs(len(fqn) - len(name)))
    alike = difflib.get_close_matches(name, names, cutoff=0.4)
    near = [repr(fqn) for fqn in dict.fromkeys([*same, *alike])]
    return listing(near[:3], "; nearest: ") or listing(names, "; it calls: ")
