"""Refuse Python loops of many turns while a forward is exported: each turn adds its operations to the graphs, and a graph of a
scan over thousands of positions would take hours.

A turn is one more run of the same instruction in the same call of a function of the user's code. Loops over layers call
functions, and each call counts by itself. Loops of a few turns (experts, chunks) do not count.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

from torch import nn, overrides

from graphpp._torch.aot import Context, answered
from graphpp.capture.source_lines import is_user_file
from graphpp.capture.trace import TracedStep
from graphpp.errors import CaptureError

_FREE = 8  # turns of a loop that do not count
_MOST = 64  # turns of all loops together; each takes a plan about 0.2 s
_FOLLOWED = 32  # calls: more are looked through for those that have returned


def long_loops_refused(model: nn.Module) -> Context:
    """Within this context an export of the model and its loss raises `CaptureError` at the operation that is one too many."""
    turns = _Turns(model)

    def answer(module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        with turns if isinstance(module, TracedStep) else nullcontext():  # within torch's modes, whose own calls do not count
            return call(module, *args, **kwargs)

    return answered(answer)


class _Turns(overrides.TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._refused = ""
        self._call: FrameType | None = None  # that was counted last: an operator may be traced as several
        self._model, self._calls, self._turns = model, dict[FrameType, Counter[int]](), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # attributes make no operations
            call, frames = _frames(sys._getframe())
            if frames and call is not self._call:
                self._call = call
                self._count(frames)
        return func(*args, **(kwargs or {}))

    def _count(self, frames: list[FrameType]) -> None:
        frame = frames[0]
        if frame not in self._calls and len(self._calls) >= _FOLLOWED:
            self._calls = {each: self._calls[each] for each in frames if each in self._calls}
        runs = self._calls.setdefault(frame, Counter())
        most = max(runs.values(), default=0)
        runs[frame.f_lasti] += 1
        self._turns += runs[frame.f_lasti] > max(most, _FREE)
        if self._turns > _MOST:
            self._refused = self._refused or self._refusal(frames)  # a capture may try again in another way
            raise CaptureError(self._refused)

    def _refusal(self, frames: list[FrameType]) -> str:
        names = {module: name for name, module in self._model.named_modules()}
        owners = (frame.f_locals.get("self") for frame in frames)
        name = next((names[each] for each in owners if isinstance(each, nn.Module) and each in names), "")
        place = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno} in {frames[0].f_code.co_name}"
        return (
            f"cluster costs: {name or 'the model'} runs a Python loop at {place}, whose turns are too many operations to plan: "
            "use code that computes all turns at once (a chunked scan, a kernel), or give an example with fewer positions"
        )


def _frames(frame: FrameType | None) -> tuple[FrameType | None, list[FrameType]]:
    """The user's call of a function of torch, and the running calls of the functions of model and loss, innermost first. None
    are found outside of a forward, and for an operation that torch's own code runs, such as a layer's."""
    call, found = None, list[FrameType]()
    while frame is not None and frame.f_code is not TracedStep.forward.__code__:
        if is_user_file(frame.f_code.co_filename):
            found.append(frame)
        elif not found:
            call = frame
        frame = frame.f_back
    return call, found if frame is not None and call is not None and call.f_code.co_name == "__torch_function__" else []
