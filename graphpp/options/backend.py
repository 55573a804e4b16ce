"""`backend=`: the compiler or interpreter of a stage program's operations, as data.

To add one: a frozen dataclass like `Inductor` in this file and a row in `backends/choose_backend.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphpp.arguments import FLAG, MAPPING, PATH, TEXT, function_of, or_none, require, shown
from graphpp.errors import GraphPPError

if TYPE_CHECKING:
    import torch
    from torch import fx

CompileFunction = Callable[["fx.GraphModule", list["torch.Tensor"]], Callable[..., Any]]
_FUNCTION = function_of("(module, examples) -> callable")


@dataclass(frozen=True)
class Eager:
    """torch's operators one by one, bit-equal to a plain loop.

    `cudagraphs`: the second step over microbatches of some shapes is recorded as CUDA graphs, and later steps replay them. A
    step of one process is one graph. With other ranks, offload, dropout or operations for which the host waits, each stage
    program is a graph for each microbatch; programs with collectives, random numbers or such operations run without one, and
    `Pipeline.cudagraphs` says why. Graphs pay where kernels are so small that the device waits for the host. Saved values stay
    in memory of the graphs, which keep that memory between steps.
    """

    cudagraphs: bool = False

    def __post_init__(self) -> None:
        _check_flag(self)


@dataclass(frozen=True)
class Inductor:
    """Each distinct layer compiled with Inductor once, and kept for other ranks and later runs.

    `options`: of `torch._inductor.config`, by name. `cache`: the folder for compiled code; None: the folder that the variable
    GRAPHPP_CACHE names, or the user's own. `cudagraphs`: as for `Eager`. `mode`: the options of a mode of `torch.compile`, such
    as "max-autotune"; `options` override them, and a mode's CUDA graphs are `cudagraphs` here.
    Raises `GraphPPError` for a cache that is no path and for options that are no mapping; `compile` raises for modes, options
    and types of values that Inductor lacks, and for options that only parts of `torch.compile` before Inductor read.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | os.PathLike[str] | None = None
    cudagraphs: bool = False
    mode: str | None = None

    def __post_init__(self) -> None:
        _check_flag(self)
        require(GraphPPError, "Inductor.mode", or_none(TEXT), self.mode)
        require(GraphPPError, "Inductor.cache", or_none(PATH), self.cache)
        require(GraphPPError, "Inductor.options", MAPPING, self.options)


@dataclass(frozen=True)
class Custom:
    """A function that compiles one region of operations, as `torch.compile(backend=)` takes it.

    `function(module, examples)`: an `fx.GraphModule` and its example inputs without data -> a callable. `cudagraphs`: as for
    `Eager`.
    """

    function: CompileFunction
    cudagraphs: bool = False

    def __post_init__(self) -> None:
        _check_flag(self)
        require(GraphPPError, "Custom.function", _FUNCTION, self.function)


Backend = Eager | Inductor | Custom
BackendLike = str | Backend | CompileFunction
BACKEND_FORMS = '"eager", "inductor", `Eager`, `Inductor`, `Custom`, a function (module, examples) -> callable'


def read_backend(form: BackendLike) -> Backend:
    if isinstance(form, Eager | Inductor | Custom):
        return form
    if isinstance(form, str) and form in ("eager", "inductor"):
        return Eager() if form == "eager" else Inductor()
    if _FUNCTION.accepts(form):
        return Custom(form)  # type: ignore[arg-type]
    raise GraphPPError(f"take {BACKEND_FORMS}, got {shown(form)}")


def describe_backend(backend: Backend) -> list[str]:
    """The choice as text, equal on all ranks; caches may differ."""
    kind = type(backend).__name__.lower()
    options = [f"mode {backend.mode}", f"options {sorted(backend.options.items())}"] if isinstance(backend, Inductor) else []
    return [kind, *options, f"cudagraphs={backend.cudagraphs}"]


def _check_flag(backend: Backend) -> None:
    require(GraphPPError, f"{type(backend).__name__}.cudagraphs", FLAG, backend.cudagraphs)
