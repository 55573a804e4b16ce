"""The compiler that a `backend=` option means.

Contract: to add a backend, add its option in `options/backend.py` and its case in `compiler_of`. A compiled region gets inputs
with the graph's strides and returns such results (`CompiledRegion`). A region that the caller's function returns unchanged runs
eagerly with the strides that kernels make, so that reductions round as without regions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from graphpp._torch.aot import with_bodies
from graphpp.arguments import shown
from graphpp.backends.inductor import InductorCompiler
from graphpp.backends.kernels import product_workspace
from graphpp.backends.region_results import CompiledRegion, FreshResultsCheck
from graphpp.errors import GraphPPError
from graphpp.options.backend import Backend, CompileFunction, Custom, Inductor
from graphpp.passes.graph.region import Region
from graphpp.passes.stage.fuse_grad_accumulation import ProductWorkspace
from graphpp.passes.text.render import Run
from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel


def workspace_of(backend: Backend) -> ProductWorkspace | None:
    """Gives the temporary bytes of the backend's `products` when adding to a sum; None: torch's kernel, which needs none."""
    return product_workspace if isinstance(backend, Inductor) else None


class FunctionCompiler:
    """Compiles by the caller's function (module, examples) -> callable."""

    products: MatmulKernel | None = None
    takes_sizes = False

    def __init__(self, function: CompileFunction) -> None:
        self._function = function

    def __call__(self, region: Region) -> Run:
        """Compile a copy of the region, as the function may change it. Raises `GraphPPError` for a non-callable result."""
        module = with_bodies(copy.deepcopy(region.graph))
        forward = module.forward  # recompiling a changed graph replaces the method
        compiled: Any = self._function(module, region.examples)
        if not callable(compiled):
            name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
            raise GraphPPError(f"backend: the function {name} must return a callable, but returned {shown(compiled)}")
        run = _checked(region, compiled)
        unchanged = module.forward == forward and compiled in (module, forward)
        return run if unchanged else CompiledRegion(region, run)


RegionCompiler = InductorCompiler | FunctionCompiler


def compiler_of(backend: Backend) -> RegionCompiler | None:
    """The compiler of regions; None: operations run eagerly. Raises `GraphPPError` for unsupported options."""
    if isinstance(backend, Inductor):
        return InductorCompiler(backend)
    return FunctionCompiler(backend.function) if isinstance(backend, Custom) else None


def _checked(region: Region, compiled: Callable[..., Any]) -> Run:
    """Wrap a compiled function as a function of a list, which it empties, and check results for reused memory."""
    fresh = FreshResultsCheck(region)

    def run(boxed: list[Any]) -> Sequence[Any]:
        arguments = tuple(boxed)
        boxed.clear()
        results = compiled(*arguments)
        results = results if isinstance(results, list | tuple) else (results,)
        fresh.check(results, arguments)
        return results

    return run
