"""The compiled regions of a pipeline: each distinct region is compiled once.

Contract: a region that its compiler cannot compile runs eagerly, with one warning that names the region and the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from graphpp._torch.this_thread import alone
from graphpp.backends.compilers import RegionCompiler
from graphpp.backends.region_inputs import WithCapturedInputs
from graphpp.backends.region_results import CompiledRegion
from graphpp.passes.graph.region import Region, RegionCall
from graphpp.passes.text.render import Run, render


class Regions:
    """The compiled regions of a pipeline: each distinct one is compiled once."""

    def __init__(self, compiler: RegionCompiler) -> None:
        self._compile = compiler
        self._compiled: dict[str, Run] = {}

    def new(self, calls: Sequence[RegionCall]) -> list[Region]:
        """The distinct regions of these calls that are not yet compiled."""
        return list({call.region.key: call.region for call in calls if call.region.key not in self._compiled}.values())

    def compile(self, region: Region) -> None:
        """Compile a region. If its compiler raises, warn, and let the region run eagerly.

        One thread at a time compiles: the filters of warnings, Inductor's tables and its folder belong to the process.
        """
        try:
            with alone(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a compiler's warnings about its own code
                self._compiled[region.key] = self._compile(region)
        except Exception as error:  # a compiler may raise anything
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            message = f"graphpp: {region.title} cannot be compiled and will run eagerly: {type(error).__name__}: {reason}"
            warnings.warn(message, stacklevel=2)
            self._compiled[region.key] = render(region.graph, region.title).load(f"<graphpp {region.title}>")

    def keep_only(self, keys: Iterable[str]) -> None:
        """Drop the compiled code of all other regions."""
        wanted = set(keys)
        self._compiled = {key: run for key, run in self._compiled.items() if key in wanted}

    def bind(self, calls: Sequence[RegionCall]) -> None:
        """Let each call run the compiled code of its region."""
        for call in calls:
            run = self._compiled[call.region.key]
            call.run = WithCapturedInputs(run) if isinstance(run, CompiledRegion) else run
