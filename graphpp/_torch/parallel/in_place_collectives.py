"""The collectives of `torch.distributed` in a model that is being traced.

Contract: while `as_functional` is open, `all_reduce` in the thread that traces computes by a functional collective and copies
the result into its tensor, so that the graph has the collective. Autograd knows neither form. Every other call that
communicates raises `CaptureError`, since a trace has no place for its effect:

- functions of `torch.distributed`, in whichever module they stand (`from torch.distributed import broadcast`);
- methods of process groups and of their backends, and so the functions that call them from elsewhere;
- the class `P2POp`.

`isend` and `irecv` are refused when they run. `P2POp` compares its operation with these two functions, so a replacement would
break another thread that sends in batches.

The refused names are those that torch has, without the `_LOCAL` ones, so a name that a later torch adds is refused until
somebody adds it there. Of private names only those with the word of a collective are refused, since torch calls the rest
itself. Making and ending groups is not refused: a finalizer may end a group of another model during a trace.

Checked on torch 2.13.0 and 2.15.0:

- `torch.distributed._functional_collectives`: the function `all_reduce`, which returns a new tensor
- `torch.distributed.distributed_c10d`: the names `has_torch_function` and `handle_torch_function`, by which a function of the
  module asks an open mode (`torch.export` has one) to run it; torch 2.11 may lack them
- `torch.distributed._Backend`: the base of the classes that do the work of a `ProcessGroup`
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, NewType, NoReturn

import torch
import torch.distributed as dist

from graphpp._torch.this_thread import found_in_modules, replaced
from graphpp.errors import CaptureError

_LOCAL = re.compile(
    r"((get|is|set|supports|new|init|register)_.*|(destroy_process|split|merge_remote|shrink)_?group|rendezvous|record_comm"
    r"|rank|size|name|boxed|unbox|abort|shutdown|options|mem_allocator|memory_stats|create_(default_)?device"
    r"|setUsePgForSymmMemRendezvous)"
)  # public names that ask about a group, make one or end one
_WRITES = re.compile(r"reduce|gather|scatter|to_?all|broadcast")  # the words of collectives that write into tensors
_COMPARED = ("isend", "irecv")
_WORDS = re.compile(rf"{_WRITES.pattern}|coalesc|send|recv")


@contextlib.contextmanager
def as_functional(line: Callable[[], str]) -> Iterator[None]:
    """While open, collectives are traced or refused; `line` says where the code of the model is."""
    if not dist.is_available():
        yield
        return
    functions = communicating_functions()
    instead = {name: _refusal(f"torch.distributed.{name}", line) for name in functions} | {"all_reduce": _all_reduce(line)}
    known = {id(functions[name]): function for name, function in instead.items() if name not in _COMPARED}
    with contextlib.ExitStack() as stack:
        for module, key, function in found_in_modules(known):
            stack.enter_context(replaced(module, key, known[id(function)]))
        for owner, name in communicating_methods():
            stack.enter_context(replaced(owner, name, _refusal(f"{owner.__name__}.{name}", line)))
        stack.enter_context(replaced(dist.P2POp, "__new__", _refusal("torch.distributed.P2POp", line)))
        if hasattr(dist.distributed_c10d, "handle_torch_function"):
            stack.enter_context(replaced(dist.distributed_c10d, "has_torch_function", lambda arguments: True))
            stack.enter_context(replaced(dist.distributed_c10d, "handle_torch_function", partial(_run_instead, instead)))
        yield


def communicating_functions() -> dict[str, Any]:
    """The functions of `torch.distributed` that talk to other ranks, by name; `all_reduce` is one of them."""
    names = {**vars(dist.distributed_c10d), **vars(dist)}
    public = {*dist.distributed_c10d.__all__, *vars(dist)}  # the module has imports of other modules, too
    return {
        name: value
        for name, value in names.items()
        if (name in public or name.startswith("_")) and _is_routine(value) and _communicates(name)
    }


def communicating_methods() -> list[tuple[type, str]]:
    """The methods of process groups and of their backends that talk to other ranks: the class and the name."""
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


def _run_instead(
    instead: Mapping[str, Callable[..., Any]], function: Callable[..., Any], relevant: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run what stands for a function that somebody has kept under another name, such as an attribute of a module."""
    return instead[function.__name__](*args, **kwargs)


def _all_reduce(line: Callable[[], str]) -> Callable[..., None]:
    def run(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        from torch.distributed._functional_collectives import all_reduce

        if async_op:
            _refusal("torch.distributed.all_reduce(async_op=True)", line)()
        name = "sum" if op is None or op == dist.ReduceOp.SUM else str(op).rpartition(".")[2].lower()
        ranks: Any = dist.group.WORLD if group is None else group
        with torch.no_grad():
            tensor.copy_(all_reduce(tensor.detach(), name, ranks))

    return run


def _refusal(name: str, line: Callable[[], str]) -> Callable[..., NoReturn]:
    """A function that stands for the function or method `name`, and refuses the call."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        called = _public_function(sys._getframe(1)) or name
        raise CaptureError(f"the forward or a backward calls {called} at {line()}, which {_reason(called.rpartition('.')[2])}")

    return refuse


def _public_function(frame: FrameType | None) -> str:
    """The function of `torch.distributed` that was entered first, if its code has come to `frame`; else empty."""
    name = ""
    while frame is not None and frame.f_code.co_filename == dist.distributed_c10d.__file__:
        name, frame = f"torch.distributed.{frame.f_code.co_name}", frame.f_back
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
