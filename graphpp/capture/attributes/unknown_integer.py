"""An integer without a value, which stands in for a counter during a trace.

Contract: integers may be added and subtracted, which gives another integer without a value. Every other use (a comparison, a
product, an index, a size, a string, an argument of an operator) raises `CaptureError` with the user's line, and sets `used`,
also where the user's code catches the error.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

from graphpp.capture.source_lines import user_frame
from graphpp.errors import CaptureError


@dataclass
class Uses:
    """Whether the value of an integer, or of one made from it, was asked for."""

    found: bool = False


@dataclass(eq=False, repr=False)
class UnknownInteger:
    """The unknown integer plus `offset`."""

    uses: Uses = field(default_factory=Uses)
    offset: int = 0

    def __add__(self, other: Any) -> UnknownInteger:
        if type(other) is not int:
            self._refuse()
        return UnknownInteger(self.uses, self.offset + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> UnknownInteger:
        return self.__add__(-other if type(other) is int else other)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        self.uses.found = True
        raise CaptureError(f"the number is used at {user_frame(traceback.extract_stack())}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        cls()._refuse()

    __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __divmod__ = __rdivmod__ = __pow__ = __rpow__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __matmul__ = __rmatmul__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = __contains__ = _refuse
    __str__ = __repr__ = __format__ = _refuse
