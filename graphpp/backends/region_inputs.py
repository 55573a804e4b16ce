"""Give the inputs of a compiled region the strides that they have in the graph.

Contract: a region is compiled for the graph's strides, and Inductor raises for others. A kernel that the program calls itself,
or that a region calls eagerly, may return other strides than its fake twin did during the trace. The inputs that differ depend
on the place of the call: equal layers share one compiled region, but not the kernels that run before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphpp._torch.symbols import Values
from graphpp.backends.region_results import CompiledRegion, metas_of, strides_differ
from graphpp.runtime.messages.wire_layout import copy_with_strides
from graphpp.runtime.program import TensorMeta


class WithCapturedInputs:
    """One call of a compiled region; inputs with other strides than the graph's are copied to the graph's first.

    The first run finds these inputs; the same kernels make them in every later run.
    """

    def __init__(self, run: CompiledRegion, values: Values | None = None) -> None:
        """`values`: the numbers for symbolic sizes of the region."""
        self._run = run
        self._metas = metas_of(run.region.examples, values)
        self._mismatched: list[tuple[int, TensorMeta]] | None = None

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        if self._mismatched is None:
            pairs = enumerate(zip(boxed, self._metas, strict=True))
            self._mismatched = [(at, meta) for at, (value, meta) in pairs if meta is not None and strides_differ(value, meta)]
        for at, meta in self._mismatched:
            boxed[at] = copy_with_strides(meta, boxed[at])
        return self._run(boxed)
