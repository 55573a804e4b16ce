"""The compiled regions of a pipeline: each distinct region is compiled once.

Contract: a region that its compiler cannot compile runs eagerly, with one warning that names the region and the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from graphpp.backends.compilers import RegionCompiler
from graphpp.backends.region_inputs import WithCapturedInputs
from graphpp.backends.region_results import CompiledRegion
from graphpp.passes.graph.region import Region, RegionCall
from graphpp.passes.text.render import Run, render


class Regions:
    """The compiled regions of a pipeline: each distinct one is compiled once."""

    def __init__(self, compiler: RegionCompiler) -> None:
        self._compile = compiler
        self._known: dict[str, Run] = {}

    def new(self, calls: Sequence[RegionCall]) -> list[Region]:
        """The distinct regions of these calls that are not compiled yet."""
        return list({call.region.key: call.region for call in calls if call.region.key not in self._known}.values())

    def compile(self, region: Region) -> None:
        """Compile a region, or let it run eagerly, with a warning."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a compiler thinks of its own parts
                self._known[region.key] = self._compile(region)
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
            run = self._known[call.region.key]
            call.run = WithCapturedInputs(run) if isinstance(run, CompiledRegion) else run
