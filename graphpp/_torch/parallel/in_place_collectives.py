"""The collectives of `torch.distributed` in a model that is being traced.

Contract: while `as_functional` is open, the tracing thread runs `all_reduce` as a functional collective and copies the result
into its tensor, so that the graph has the collective. Autograd differentiates neither form. Every other communicating method of
a process group or backend raises `CaptureError`; all functions of `torch.distributed` call these methods.

All public methods not in `_LOCAL` are refused, so that new methods of a later torch are refused too. Torch calls private ones
itself, so only those with the word of a collective are refused. Making and destroying groups is allowed: a finalizer may
destroy a group of another model during a trace.

Checked on torch 2.13.0 and 2.15.0:

- `torch.distributed._functional_collectives.all_reduce`, which returns a new tensor
- `torch.distributed.distributed_c10d.has_torch_function`: whether an open mode, such as export's, handles a collective; torch
  2.11 may lack the name
- `torch.distributed._Backend`: the base class of the backends of a `ProcessGroup`
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NewType, NoReturn

import torch
import torch.distributed as dist

from graphpp._torch.this_thread import replaced
from graphpp.errors import CaptureError

_LOCAL = re.compile(
    r"((get|is|set|supports|new|init|register)_.*|(merge_remote|split)_group|rank|size|name|boxed|unbox|abort|shutdown|options"
    r"|mem_allocator|memory_stats|create_(default_)?device|setUsePgForSymmMemRendezvous)"
)  # public methods that query, make or destroy a group
_WRITES = re.compile(r"reduce|gather|scatter|to_?all|broadcast")  # collectives that write into tensors
_WORDS = re.compile(rf"{_WRITES.pattern}|coalesc|send|recv")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


@contextlib.contextmanager
def as_functional(line: Callable[[], str]) -> Iterator[None]:
    """While open, collectives are traced or refused; `line` returns the current source line of the model."""
    with contextlib.ExitStack() as stack:
        if dist.is_available() and hasattr(dist.distributed_c10d, "has_torch_function"):
            stack.enter_context(replaced(dist.distributed_c10d, "has_torch_function", lambda arguments: False))
        for owner, name in communicating_methods() if dist.is_available() else ():
            refusal = _refusal(f"{owner.__name__}.{name}", line)
            traced = owner is dist.ProcessGroup and name == "allreduce"
            stack.enter_context(replaced(owner, name, _all_reduce(refusal) if traced else refusal))
        yield


def communicating_methods() -> list[tuple[type, str]]:
    """The methods (class, name) of process groups and their backends that communicate with other ranks."""
    classes = [*_with_subclasses(dist.ProcessGroup), *_with_subclasses(vars(dist)["_Backend"])]
    members = [(owner, name, value) for owner in classes for name, value in vars(owner).items()]
    return [(owner, name) for owner, name, value in members if _is_routine(value) and _communicates(name)]


def _with_subclasses(owner: type[Any]) -> Iterator[type]:
    yield owner
    each: type[Any]
    for each in owner.__subclasses__():
        yield from _with_subclasses(each)


def _is_routine(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | NewType)


def _communicates(name: str) -> bool:
    return bool(_WORDS.search(name)) if name.startswith("_") else not _LOCAL.fullmatch(name)


def _all_reduce(refusal: Callable[..., NoReturn]) -> Callable[..., dist.Work]:
    def run(group: dist.ProcessGroup, tensors: Any, options: Any = None) -> dist.Work:
        from torch.distributed._functional_collectives import all_reduce

        if getattr(options, "asyncOp", False):
            refusal()
        op = getattr(options, "reduceOp", options)
        name = "sum" if op is None or op == dist.ReduceOp.SUM else str(op).rpartition(".")[2].lower()
        with torch.no_grad():
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                tensor.copy_(all_reduce(tensor.detach(), name, group))
        return _Done()

    return run


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def _refusal(name: str, line: Callable[[], str]) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        called = _public_function(sys._getframe(1)) or name
        raise CaptureError(f"the forward or a backward calls {called} at {line()}, which {_reason(called.rpartition('.')[2])}")

    return refuse


def _public_function(frame: FrameType | None) -> str:
    """The public function of `torch.distributed` through which user code reached `frame`; empty if none."""
    name = ""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, os.path.dirname(__file__))):
        if frame.f_code.co_filename == dist.distributed_c10d.__file__:
            name = f"torch.distributed.{frame.f_code.co_name}"
        frame = frame.f_back
    return name


def _reason(name: str) -> str:
    if not _WRITES.search(name) or "object" in name:
        return (
            "cannot stand in a graph: every step runs the graph in place of the forward, and the call would be lost. Move the "
            "call out of the forward, before or after pipe.step(...)."
        )
    writes = "writes into its arguments and cannot stand in a graph. Call "
    if re.search(r"all_?reduce", name):
        return f"{writes}torch.distributed.all_reduce for each tensor, without async_op: graphpp traces this function."
    return (
        f"{writes}the functional collective of torch.distributed._functional_collectives that autograd knows, such as "
        "all_to_all_single_autograd."
    )
