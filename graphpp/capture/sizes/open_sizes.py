"""A graph that serves several sizes of the microbatch's tensors, or the reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from graphpp._torch.symbols import Symbols
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.outputs import check_output_leaves
from graphpp.capture.sizes.same_operations import difference
from graphpp.capture.source_lines import is_user_file
from graphpp.capture.trace import CapturedGraph
from graphpp.errors import CaptureError

Open = Mapping[str, Sequence[int]]
"""The dynamic dimensions of tensors, by path."""


def with_open_sizes(
    run: Callable[[], CapturedGraph], fixed: CapturedGraph, example: FlatMicrobatch, open_sizes: Open, some: bool
) -> CapturedGraph:
    """A graph for several sizes, or `fixed` with the reason why there is none.

    `some`: accept a graph that leaves only some of these sizes dynamic. Both graphs are compared at the example's sizes, as
    code can distinguish a symbol from an integer.
    """
    try:
        several = run()
        check_output_leaves(several)
        symbols = several.joint.symbols
        values = symbols.values(example.shapes) if symbols is not None else None
        assert symbols is not None and values is not None, "a graph does not hold for the sizes of which it was captured"
        unlike = difference(several.joint, values, fixed.joint)
        if symbols.compares_floats:
            raise CaptureError("a branch depends on a floating-point number that is computed from a size")
    except Exception as error:  # the model has a graph for one size
        reason = f"a trace for all sizes raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return replace(fixed, fixed_because=reason)
    if unlike is not None:
        reason = f"code that can tell a symbol from an integer computes something else for symbols: {unlike}"
        return replace(fixed, fixed_because=reason)
    paths = list(example.tensors)
    wanted = {(paths.index(path), dim) for path, dims in open_sizes.items() for dim in dims}
    if wanted <= symbols.free or (some and symbols.free):
        return several
    return replace(fixed, fixed_because=f"model or loss fix a size: {_fixing_lines(symbols, paths)}")


def _fixing_lines(symbols: Symbols, paths: Sequence[str]) -> str:
    """The equations that a trace assumed, with user lines: `args[0].shape[1] == 9 at model.py:37`."""
    names = {symbol.name: f"{paths[index]}.shape[{dim}]" for symbol, (index, dim) in symbols.places.items()}
    lines = []
    for equation, frame in symbols.equalities():
        text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), equation)
        of_user = frame is not None and is_user_file(frame.filename)
        lines.append(f"{text} at {Path(frame.filename).name}:{frame.lineno}" if frame is not None and of_user else text)
    return "; ".join(lines)
