"""The compiler that a `backend=` option means.

Contract: `compiler_of` gives a `RegionCompiler`, or None where operations run eagerly. To add a backend: its option in
`options/backend.py`, and its row in `compiler_of`. A compiled region is called with the graph's strides and returns them
(`CompiledRegion`). A region that the caller's function leaves as it was runs eagerly and keeps the strides that kernels make,
so that its reductions round as in the program without regions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from graphpp.arguments import shown
from graphpp.backends.inductor import InductorCompiler
from graphpp.backends.kernels import product_workspace
from graphpp.backends.region_results import CompiledRegion, FreshResultsCheck
from graphpp.errors import GraphPPError
from graphpp.options.backend import Backend, CompileFunction, Custom, Eager, Inductor
from graphpp.passes.graph.region import Region
from graphpp.passes.stage.fuse_grad_accumulation import ProductWorkspace
from graphpp.passes.text.render import Run
from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel


class RegionCompiler(Protocol):
    """Compiles regions."""

    @property
    def takes_sizes(self) -> bool:
        """Whether the compiler can compile a region whose sizes are symbolic."""

    @property
    def products(self) -> MatmulKernel | None:
        """The kernel that the backend prefers to torch's for matrix products of gradients; None: torch's."""

    def __call__(self, region: Region) -> Run:
        """Compile a region; returns its function of a list of inputs, which the call empties.

        A `CompiledRegion`, or a plain function if the region runs eagerly.
        """


def compiler_of(backend: Backend) -> RegionCompiler | None:
    """The compiler of regions; None: operations run eagerly. Raises `GraphPPError` for options that the compiler lacks."""
    makers: dict[type, Callable[[Any], RegionCompiler | None]] = {
        Eager: lambda option: None,
        Inductor: InductorCompiler,
        Custom: lambda option: FunctionCompiler(option.function),
    }
    return makers[type(backend)](backend)


def workspace_of(backend: Backend) -> ProductWorkspace | None:
    """The bytes that the backend's `products` take to add a product to a sum; None: none, torch's kernel adds."""
    return product_workspace if isinstance(backend, Inductor) else None


class FunctionCompiler:
    """A compiler made of the caller's function (module, examples) -> callable."""

    products: MatmulKernel | None = None
    takes_sizes = False

    def __init__(self, function: CompileFunction) -> None:
        self._function = function

    def __call__(self, region: Region) -> Run:
        """Compile a copy of the region, since the function may change the graph that it is given.

        Raises `GraphPPError` where the function returns no callable.
        """
        module = fx.GraphModule({}, copy.deepcopy(region.graph))
        forward = module.forward  # recompiling a changed graph replaces the method
        compiled: Any = self._function(module, region.examples)
        if not callable(compiled):
            name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
            raise GraphPPError(f"backend: the function {name} must return a callable, but returned {shown(compiled)}")
        run = _checked(region, compiled)
        unchanged = module.forward == forward and compiled in (module, forward)
        return run if unchanged else CompiledRegion(region, run)


def _checked(region: Region, compiled: Callable[..., Any]) -> Run:
    """A compiled function as a function of a list that the call empties, with its results checked for reused memory."""
    fresh = FreshResultsCheck(region)

    def run(boxed: list[Any]) -> Sequence[Any]:
        arguments = tuple(boxed)
        boxed.clear()
        results = compiled(*arguments)
        results = results if isinstance(results, list | tuple) else (results,)
        fresh.check(results, arguments)
        return results

    return run
