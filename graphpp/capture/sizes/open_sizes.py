"""A graph that serves several sizes and numbers of a microbatch, or the reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from graphpp._torch import aot
from graphpp._torch.symbols import Symbols, Values, as_expression, unknown_symbols
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.outputs import with_unseen
from graphpp.capture.sizes.same_operations import difference, operations_of
from graphpp.capture.source_lines import is_user_file
from graphpp.capture.trace import CapturedGraph
from graphpp.errors import CaptureError
from graphpp.runtime.program import Number

_TELLS = "code that can tell a symbol from an integer computes something else for symbols"
Open = Mapping[str, Sequence[int]]
"""The dynamic dimensions of tensors, by path."""


def noted(captured: CapturedGraph, example: FlatMicrobatch) -> CapturedGraph:
    """The graph with its operations at the sizes of the example, before passes change the graph."""
    return replace(captured, operations=operations_of(captured.joint, _values(captured, example)))


def with_open_sizes(
    run: Callable[[], CapturedGraph], fixed: CapturedGraph, example: FlatMicrobatch, open_sizes: Open, some: bool
) -> CapturedGraph:
    """A graph for several sizes, or `fixed` with the reason why there is none.

    `example`: a microbatch of the sizes of `fixed`. `some`: accept a graph that leaves only some of these sizes dynamic.
    """
    several = _general(run, fixed, example, "for all sizes")
    if isinstance(several, str):
        return replace(fixed, fixed_because=several)
    symbols, paths = several.joint.symbols, list(example.tensors)
    assert symbols is not None
    wanted = {(paths.index(path), dim) for path, dims in open_sizes.items() for dim in dims}
    if wanted <= symbols.free or (some and symbols.free):
        return several
    return replace(fixed, fixed_because=f"model or loss fix a size: {_fixing_lines(symbols, paths)}")


def with_open_numbers(run: Callable[..., CapturedGraph], plain: CapturedGraph, example: FlatMicrobatch) -> CapturedGraph:
    """A graph with the example's numbers as inputs, or `plain` with the numbers for which there is none, and the reasons."""

    def found(paths: frozenset[str]) -> CapturedGraph | str:
        part = example.with_numbers(paths)
        traced = partial(run, part.microbatch(), varying=dict.fromkeys(paths, ()))
        return _general(traced, plain, part, "with a number of any value")

    general = found(example.numbers)
    if not isinstance(general, str):
        return general
    alone = {path: found(frozenset([path])) for path in sorted(example.numbers)} if len(example.numbers) > 1 else {}
    reasons = {path: reason for path, reason in alone.items() if isinstance(reason, str)}
    return replace(plain, plain_because=reasons or dict.fromkeys(sorted(example.numbers), general))


def _general(run: Callable[[], CapturedGraph], fixed: CapturedGraph, example: FlatMicrobatch, what: str) -> CapturedGraph | str:
    """The result of `run`, a graph with symbols, or the reason why it cannot take the place of `fixed`.

    Both graphs are compared at the example's numbers, as code can distinguish a symbol from an integer.
    """
    try:
        with aot.failing_quietly():
            several = with_unseen(run())
        if (several.output_spec, several.output_leaves) != (fixed.output_spec, fixed.output_leaves):
            raise CaptureError("a number or a size is in the model's output")
        assert fixed.operations is not None, "the graph for one size is noted before passes change it"
        unlike = difference(operations_of(several.joint, _values(several, example)), fixed.operations)
        if several.joint.symbols is not None and several.joint.symbols.compares_floats:
            raise CaptureError("a branch depends on a floating-point number that is computed from a size")
    except Exception as error:  # the model has a graph for one size
        first, *more = str(error).strip().splitlines() or [""]
        line = next((each for each in more if each.startswith("  at ")), "")
        return f"a trace {what} raises {type(error).__name__}: {first}{line}"
    return several if unlike is None else f"{_TELLS}: {unlike}"


def _values(captured: CapturedGraph, example: FlatMicrobatch) -> Values:
    """The example's numbers for the symbols of a graph."""
    joint, found = captured.joint, dict[Any, Any]()
    if joint.symbols is not None:
        sizes = joint.symbols.values(example.shapes)
        if sizes is None:
            raise CaptureError("the graph does not hold for the sizes of the microbatch that it is compared at")
        found.update(sizes.of_symbols)
    for role, node in joint.inputs().items():
        number = as_expression(example.tensors[role.path].item()) if isinstance(role, Number) else None
        found |= {symbol: number for user in node.users if number is not None for symbol in unknown_symbols(user.meta["val"])}
    return Values(found)


def _fixing_lines(symbols: Symbols, paths: Sequence[str]) -> str:
    """The equations that a trace assumed, with user lines: `args[0].shape[1] == 9 at model.py:37`."""
    names = {symbol.name: f"{paths[index]}.shape[{dim}]" for symbol, (index, dim) in symbols.places.items()}
    lines = []
    for equation, frame in symbols.equalities():
        text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), equation)
        of_user = frame is not None and is_user_file(frame.filename)
        lines.append(f"{text} at {Path(frame.filename).name}:{frame.lineno}" if frame is not None and of_user else text)
    return "; ".join(lines)
