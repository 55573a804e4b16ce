"""What `backend=` says: who runs the operations of a stage program.

Contract
    in   "eager", "inductor", a `graphpp.Inductor`, or a function (module, examples) -> callable, as torch.compile takes
    out  None for eager; else a function that compiles one region of operations, once per distinct region
    What a backend cannot compile runs eagerly, with one warning that names it and says why.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphpp.backends.disk_cache import Cache, default_root
from graphpp.backends.gemm_kernels import ProductKernels
from graphpp.backends.region_results import AsCaptured, Fresh
from graphpp.errors import GraphPPError
from graphpp.passes.graph.region import Region, RegionCall
from graphpp.passes.text.render import Run, render

_VECTOR_UNITS = "vector_units.json"  # those that can be built and loaded

Custom = Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


@dataclass(frozen=True)
class Inductor:
    """Compile with Inductor. `options`: of `torch._inductor.config`; `cache`: the folder for what was compiled, None: the
    one that the variable GRAPHPP_CACHE names, or the user's own."""

    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | os.PathLike[str] | None = None

    @cached_property
    def _cache(self) -> Cache:
        return Cache(Path(self.cache) if self.cache is not None else default_root())

    @cached_property
    def products(self) -> ProductKernels:
        """The kernels of matrix products."""
        return ProductKernels(self._cache)

    def __call__(self, region: Region) -> Run:
        """The region's function of a boxed list."""
        compile_graph = self._compiler
        with self._cache.entry(self._key(region)) as folder, _caching_in(folder):
            return compile_graph(region.graph, region.examples, self.options, self.products.choose)

    @cached_property
    def _compiler(self) -> Callable[..., Run]:
        from graphpp._torch import inductor  # takes a second, for which eager pipelines need not wait

        known = self._cache.read(_VECTOR_UNITS)
        before = dict(known)
        with self._cache.entry("processor") as folder, _caching_in(folder):
            inductor.find_vector_units(known)
        if known != before:
            self._cache.write(_VECTOR_UNITS, known)
        return inductor.compile_graph

    def _key(self, region: Region) -> str:
        device = next((value.device for value in region.examples if isinstance(value, torch.Tensor)), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        words = [region.key, torch.__version__, name, str(sorted(self.options.items())), str(torch.get_num_threads())]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:40]


Given = str | Inductor | Custom
Compile = Callable[[Region], Run]


def chosen(given: object) -> Inductor | Custom | None:
    """What compiles the regions; None: nothing does. Raises `GraphPPError` for anything that is no backend.

    And for options that Inductor does not have: every region would fail by them, and run eagerly.
    """
    if given in (None, "eager"):
        return None
    if given == "inductor":
        return Inductor()
    if isinstance(given, str) or not callable(given):
        raise GraphPPError(
            f"backend={given!r}: take 'eager', 'inductor', a graphpp.Inductor, or a function (module, examples) -> callable"
        )
    if isinstance(given, Inductor) and not isinstance(given.cache, str | os.PathLike | None):
        raise GraphPPError(f"graphpp.Inductor(cache={given.cache!r}): take the path of a folder, or None")
    if isinstance(given, Inductor) and given.options:
        _check_options(given.options)
    return given


def _check_options(options: object) -> None:
    if not isinstance(options, Mapping):
        raise GraphPPError(f"graphpp.Inductor(options={options!r}): take a mapping of names to values")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 imports what it deprecates
        from graphpp._torch import inductor
    try:
        inductor.try_options(options)
    except Exception as error:  # names that are unknown, or no names
        raise GraphPPError(
            f"graphpp.Inductor(options={dict(options)!r}): {error}; options are those of torch._inductor.config in "
            f"torch {torch.__version__}, with dots in the name where it has them ('cpp.threads')"
        ) from error


def spelled(backend: Inductor | Custom | None) -> str:
    """The choice as text that is the same on every rank."""
    if backend is None or not isinstance(backend, Inductor):
        return "eager" if backend is None else "a function"
    return f"inductor {sorted(backend.options.items())}"


class Regions:
    """The compiled regions of a pipeline: each distinct one is compiled once."""

    def __init__(self, backend: Inductor | Custom) -> None:
        self._compile: Compile = backend if isinstance(backend, Inductor) else lambda region: _by_function(backend, region)
        self._known: dict[str, Run] = {}

    def new(self, calls: Sequence[RegionCall]) -> list[Region]:
        """The distinct regions of these calls that are not compiled yet."""
        return list({call.region.key: call.region for call in calls if call.region.key not in self._known}.values())

    def compile(self, region: Region) -> None:
        """Compile a region, or let it run eagerly, with a warning."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a compiler thinks of its own parts
                self._known[region.key] = AsCaptured(region, self._compile(region))
        except Exception as error:  # whatever a compiler raises
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            told = f"graphpp: {region.title} cannot be compiled and will run eagerly: {type(error).__name__}: {reason}"
            warnings.warn(told, stacklevel=2)
            self._known[region.key] = render(region.graph, region.title).load(f"<graphpp {region.title}>")

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget all other regions."""
        kept = set(keys)
        self._known = {key: run for key, run in self._known.items() if key in kept}

    def bind(self, calls: Sequence[RegionCall]) -> None:
        """Let calls run what was compiled for their regions."""
        for call in calls:
            call.run = self._known[call.region.key]


def _by_function(function: Custom, region: Region) -> Run:
    """A region compiled by the caller's function, which may change the graph that it is given."""
    compiled = function(fx.GraphModule({}, copy.deepcopy(region.graph)), region.examples)
    if not callable(compiled):
        raise TypeError(f"the backend returned {type(compiled).__name__}, no callable")
    fresh = Fresh(region)

    def run(boxed: list[Any]) -> Sequence[Any]:
        arguments = tuple(boxed)
        boxed.clear()
        results = compiled(*arguments)
        results = results if isinstance(results, list | tuple) else (results,)
        fresh.check(results, arguments)
        return results

    return run


@contextlib.contextmanager
def _caching_in(folder: Path) -> Iterator[None]:
    """Let torch keep what it compiles in this folder, Triton's kernels too.

    Inductor sets Triton's variable when it first makes a kernel, for good: all kernels of the process would go to the entry
    that happened to be open then, after its manifest was written.
    """
    folders = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton"}
    before = {name: os.environ.get(name) for name in folders}
    os.environ.update({name: str(path) for name, path in folders.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
