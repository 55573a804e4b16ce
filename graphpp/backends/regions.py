"""The compiled regions of a pipeline: each distinct region is compiled once.

Contract
--------
- A region that its compiler cannot compile runs eagerly, with one warning that names the region and the reason. A
  `GraphPPError` of the compiler is no such reason and comes through.
- A region with symbolic sizes is compiled once for all sizes, if its compiler can do this. The compiled code may hold for a
  part of the sizes only, and a compiler may know one size at a time: then the region is compiled again for a size at which no
  code of it holds, before a step of this size begins. A call of the region runs the code for the sizes that it is given.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpp._torch.symbols import Symbols, Values
from graphpp._torch.this_thread import alone
from graphpp.backends.choose_backend import RegionCompiler
from graphpp.backends.region_results import CompiledRegion, WithCapturedInputs
from graphpp.errors import GraphPPError
from graphpp.passes.graph.region import Region, RegionCall
from graphpp.passes.text.render import Run, render

_LOG = logging.getLogger("graphpp")


@dataclass(frozen=True)
class SizedCall:
    """A call of a region in the program of a microbatch; `values`: the microbatch's sizes, if they are symbolic."""

    call: RegionCall
    values: Values | None

    @property
    def region(self) -> Region:
        """The region that is called."""
        return self.call.region


@dataclass(frozen=True)
class _Code:
    """Compiled code of a region. It holds for these sizes, or for those under which all facts of `symbols` hold, or always."""

    run: Run
    values: Values | None = None
    symbols: Symbols | None = None

    def holds(self, values: Values | None) -> bool:
        if values is None:
            return True
        return (self.values in (None, values)) and (self.symbols is None or self.symbols.hold(values))

    def bound(self, values: Values | None) -> Run:
        """The code for one set of sizes, which checks inputs and results."""
        if not isinstance(self.run, CompiledRegion):
            return self.run
        if values is None or self.values is not None:
            return WithCapturedInputs(self.run)
        return WithCapturedInputs(self.run.at(values), values)


@dataclass(frozen=True)
class _RunAtSizes:
    """Runs the code for the sizes that a call is given: the inputs at `positions`."""

    positions: tuple[int, ...]
    runs: dict[tuple[Any, ...], Run] = field(default_factory=dict)

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        return self.runs[tuple(boxed[at] for at in self.positions)](boxed)


class Regions:
    """The compiled regions of a pipeline."""

    def __init__(self, compiler: RegionCompiler) -> None:
        self._compile = compiler
        self._compiled: dict[str, list[_Code]] = {}
        self._tried: set[str] = set()  # the regions that the compiler was given with symbolic sizes

    def new(self, calls: Sequence[SizedCall]) -> list[SizedCall]:
        """One call of each distinct region of these calls for which no compiled code holds."""
        found = {(call.region.key, _numbers(call)): call for call in calls if self._code(call) is None}
        return list(found.values())

    def compile(self, call: SizedCall) -> None:
        """Compile the region of a call for the call's sizes, unless earlier code turns out to hold for them."""
        region, known = call.region, self._compiled.setdefault(call.region.key, [])
        if self._code(call) is not None:
            return
        if not region.sizes:
            known.append(_Code(self._run(region)))
            return
        if self._compile.takes_sizes and region.key not in self._tried:
            self._tried.add(region.key)
            known += self._for_all_sizes(region)
        if self._code(call) is None and call.values is not None:
            known.append(_Code(self._run(region.at(call.values)), call.values))

    def keep_only(self, keys: Iterable[str]) -> None:
        """Drop the compiled code of all other regions."""
        wanted = set(keys)
        self._compiled = {key: code for key, code in self._compiled.items() if key in wanted}
        self._tried &= wanted

    def bind(self, calls: Sequence[SizedCall]) -> None:
        """Let each call run the compiled code of its region."""
        for each in calls:
            code, sizes = self._code(each), each.region.sizes
            assert code is not None, f"{each.region.title} has not been compiled"
            if each.values is None or not sizes:
                each.call.run = code.bound(None)
                continue
            if not isinstance(each.call.run, _RunAtSizes):
                each.call.run = _RunAtSizes(tuple(sizes))
            each.call.run.runs.setdefault(_numbers(each), code.bound(each.values))

    def _code(self, call: SizedCall) -> _Code | None:
        """The compiled code that holds for the sizes of a call."""
        values = call.values if call.region.sizes else None
        return next((code for code in self._compiled.get(call.region.key, ()) if code.holds(values)), None)

    def _for_all_sizes(self, region: Region) -> list[_Code]:
        """The code of a region with symbolic sizes; none if the compiler raises, which may know each single size."""
        try:
            run = self._quietly(region)
        except Exception as error:  # a compiler may raise anything
            _LOG.info("%s is compiled for each size: %s: %s", region.title, type(error).__name__, error)
            return []
        return [_Code(run, symbols=run.symbols if isinstance(run, CompiledRegion) else None)]

    def _quietly(self, region: Region) -> Run:
        """Compile a region.

        One thread at a time compiles: the filters of warnings, Inductor's tables and its folder belong to the process.
        """
        with alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a compiler's warnings about its own code
            return self._compile(region)

    def _run(self, region: Region) -> Run:
        """Compile a region. If its compiler raises, warn, log the traceback, and let the region run eagerly."""
        try:
            return self._quietly(region)
        except GraphPPError:
            raise
        except Exception as error:  # a compiler may raise anything
            _LOG.info("%s cannot be compiled", region.title, exc_info=error)
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            message = f"graphpp: {region.title} cannot be compiled and will run eagerly: {type(error).__name__}: {reason}"
            warnings.warn(message, stacklevel=3)
            return render(region.graph, region.title).load(f"<graphpp {region.title}>")


def _numbers(call: SizedCall) -> tuple[Any, ...]:
    """The numbers of the region's inputs that are sizes."""
    return tuple(map(call.values, call.region.sizes.values())) if call.values is not None else ()
