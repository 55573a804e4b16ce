"""`memory.offload`: saved values that wait in host memory. `planner/offload_windows.py` finds them in a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphpp.arguments import FLAG, NUMBER, callback, function_of, or_none, require, shown
from graphpp.errors import GraphPPError
from graphpp.runtime.program import TensorMeta


@dataclass(frozen=True)
class Offload:
    """The saved values that leave the device between forward and backward.

    `fraction`: of the bytes that a stage saves for a microbatch, 0 to 1; the largest values leave first.
    `values`: a function of a value's `TensorMeta` that says whether the value may leave; None: values of at least
    `least_bytes` bytes, for which the copy takes longer than its launch.
    `ahead`: by how many computing actions the copy back starts before the first read.
    Raises `GraphPPError` for a value out of range.
    """

    fraction: float = 1.0
    values: Callable[[TensorMeta], bool] | None = None
    least_bytes: int = 1 << 16
    ahead: int = 1

    def __post_init__(self) -> None:
        if not NUMBER.accepts(self.fraction) or not 0 <= self.fraction <= 1:
            raise GraphPPError(f"take a fraction of the saved bytes from 0 to 1, got {shown(self.fraction)}")
        require(GraphPPError, "values", or_none(function_of("a TensorMeta")), self.values)
        if type(self.least_bytes) is not int or self.least_bytes < 0:
            raise GraphPPError(f"least_bytes: take a number of bytes of 0 or more, got {shown(self.least_bytes)}")
        if type(self.ahead) is not int or self.ahead < 1:
            raise GraphPPError(f"values come back at least one action ahead, got ahead={shown(self.ahead)}")

    def __str__(self) -> str:
        """The choice as text, equal on all ranks."""
        which = f"from {self.least_bytes} bytes" if self.values is None else "by a function"
        return f"{self.fraction} of the saved bytes, values {which}, {self.ahead} actions ahead"

    def wants(self, meta: TensorMeta, nbytes: int) -> bool:
        """Whether a value that may be offloaded should be."""
        if self.values is None:
            return nbytes >= self.least_bytes
        return bool(callback(GraphPPError, "memory.offload", FLAG, self.values)(meta))


OffloadLike = Offload | float | bool | Callable[[TensorMeta], bool] | None
OFFLOAD_FORMS = "True, a fraction of the saved bytes, a function of a `TensorMeta`, an `Offload`"


def read_offload(form: OffloadLike) -> Offload | None:
    """Any form as an `Offload`; None and False: no offloading."""
    if form is None or form is False:
        return None
    if isinstance(form, Offload):
        return form
    if isinstance(form, int | float):
        return Offload(fraction=float(form))
    if callable(form) and not isinstance(form, type):
        return Offload(values=form)
    raise GraphPPError(f"take None, {OFFLOAD_FORMS}, got {shown(form)}")
