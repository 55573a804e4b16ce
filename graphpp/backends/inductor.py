"""Compile regions with Inductor into a cache folder that ranks and later runs share.

Contract: a region is compiled once per region key, processor, torch version, options and number of threads. Options apply to
Inductor's decompositions and everything after. Modes and options that Inductor lacks raise `GraphPPError`, as do options that
only earlier parts of `torch.compile` read. Unless the user sets the layout option, it is chosen by measurement (`kernels.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from graphpp.backends.kernels import Convolutions, Products
from graphpp.backends.region_results import CompiledRegion
from graphpp.cache.disk_cache import DiskCache, default_folder
from graphpp.errors import GraphPPError
from graphpp.options.backend import Inductor
from graphpp.passes.graph.region import Region
from graphpp.passes.text.render import Run

_LAYOUT = {"layout_optimization", "force_layout_optimization"}  # user options that decide the layout
_VECTOR_UNITS = "vector_units.json"  # vector instructions that were built and loaded


class InductorCompiler:
    takes_sizes = True

    def __init__(self, option: Inductor) -> None:
        self._options = _options_of(option)
        self._cache = DiskCache(Path(option.cache) if option.cache is not None else default_folder())
        self.products = Products(self._cache)
        self._convolutions = Convolutions(self._cache)
        self._knows_vector_units = False

    def __call__(self, region: Region) -> Run:
        from graphpp._torch import inductor  # takes about a second to import, which eager pipelines save

        if "cpu" in {device.type for device in _devices(region)}:
            self.find_vector_units()
        options = self._options if _LAYOUT & self._options.keys() else {**self._convolutions.options(region), **self._options}
        with self._cache.entry(self._key(region)) as folder, _caching_in(folder):
            run, symbols = inductor.inductor_compile(
                region.graph, region.examples, options, self.products.replace_matmuls
            )
        return CompiledRegion(region, run, symbols=symbols)

    def find_vector_units(self) -> None:
        """Let Inductor detect the CPU's vector instructions; takes seconds if they are not in the cache."""
        if self._knows_vector_units:
            return
        from graphpp._torch import inductor

        self._knows_vector_units = True
        known = self._cache.read(_VECTOR_UNITS)
        before = dict(known)
        with self._cache.entry("processor") as folder, _caching_in(folder):
            inductor.find_vector_units(known)
        if known != before:
            self._cache.write(_VECTOR_UNITS, known)

    def _key(self, region: Region) -> str:
        device = next(iter(_devices(region)), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        words = [region.key, torch.__version__, name, str(sorted(self._options.items())), str(torch.get_num_threads())]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:40]


def _devices(region: Region) -> list[torch.device]:
    return [value.device for value in (*region.examples, *region.results) if isinstance(value, torch.Tensor)]


def _options_of(option: Inductor) -> dict[str, Any]:
    """The mode's options updated by the user's. Raises `GraphPPError` for unknown options and for options without effect."""
    if not option.options and option.mode is None:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 imports deprecated names
        from graphpp._torch import inductor
    try:
        of_mode = inductor.mode_options(option.mode)
    except RuntimeError as error:
        raise GraphPPError(f"Inductor.mode: {error}") from error
    if not of_mode and option.mode not in (None, "default"):
        raise GraphPPError(f"Inductor.mode: {option.mode!r} has CUDA graphs alone, which are recorded with cudagraphs=True")
    try:
        inductor.try_options(option.options)
    except Exception as error:  # names that are unknown, or no names; values of another type
        raise GraphPPError(
            f"Inductor.options: {dict(option.options)!r}: {error}; options are those of torch._inductor.config in "
            f"torch {torch.__version__}, with dots in the name where it has them ('cpp.threads')"
        ) from error
    if idle := sorted(inductor.WITHOUT_EFFECT & option.options.keys()):
        raise GraphPPError(
            f"Inductor.options: {', '.join(idle)}: torch.compile reads these before Inductor compiles a graph, in passes over "
            "graphs that it makes itself. graphpp makes the graphs, so they would have no effect; leave them out"
        )
    return {**of_mode, **option.options}


@contextlib.contextmanager
def _caching_in(folder: Path) -> Iterator[None]:
    """Let Inductor and Triton cache compiled code in `folder`.

    Triton's variable must be restored too: Inductor sets it for good at its first kernel, and all later kernels of the process
    would be written into that first entry after its manifest.
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
