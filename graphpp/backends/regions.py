"""The compiled regions of a pipeline: each distinct region is compiled once.

Contract
--------
- A region that fails to compile runs eagerly, with one warning that names the region and the reason. A `GraphPPError` of the
  compiler is raised instead.
- A region with symbolic sizes is compiled once for all sizes if its compiler supports this. If no compiled code is valid for
  a size, the region is compiled again before a step of this size begins. A call runs the code for its sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpp._torch.symbols import Symbols, Values
from graphpp._torch.this_thread import alone
from graphpp.backends.choose_backend import RegionCompiler
from graphpp.backends.region_results import CompiledRegion, WithCapturedInputs
from graphpp.errors import GraphPPError
from graphpp.log import logger
from graphpp.passes.graph.region import Region, RegionCall
from graphpp.passes.text.render import Run, render

_LOG = logger(__name__)


@dataclass(frozen=True)
class SizedCall:
    """A call of a region in a microbatch's program; `values`: the microbatch's sizes, if symbolic."""

    call: RegionCall
    values: Values | None

    @property
    def region(self) -> Region:
        return self.call.region


@dataclass(frozen=True)
class _Code:
    """Compiled code of a region: valid for the sizes `values`, or where the guards of `symbols` hold, or (None) always."""

    run: Run
    values: Values | None = None
    symbols: Symbols | None = None

    def holds(self, values: Values | None) -> bool:
        if values is None:
            return True
        return (self.values in (None, values)) and (self.symbols is None or self.symbols.hold(values))

    def bound(self, values: Values | None) -> Run:
        """The code for one set of sizes, with checks of inputs and results."""
        if not isinstance(self.run, CompiledRegion):
            return self.run
        if values is None or self.values is not None:
            return WithCapturedInputs(self.run)
        return WithCapturedInputs(self.run.at(values), values)


@dataclass(frozen=True)
class _RunAtSizes:
    """Runs the code for the sizes of a call, which are its inputs at `positions`."""

    positions: tuple[int, ...]
    runs: dict[tuple[Any, ...], Run] = field(default_factory=dict)

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        return self.runs[tuple(boxed[at] for at in self.positions)](boxed)


class Regions:
    def __init__(self, compiler: RegionCompiler) -> None:
        self._compile = compiler
        self._compiled: dict[str, list[_Code]] = {}
        self._tried: set[str] = set()  # regions that were compiled, or tried, with symbolic sizes

    def new(self, calls: Sequence[SizedCall]) -> list[SizedCall]:
        """One call per distinct region and sizes for which no compiled code is valid."""
        found = {(call.region.key, _numbers(call)): call for call in calls if self._code(call) is None}
        return list(found.values())

    def compile(self, call: SizedCall) -> None:
        """Compile the region of a call for its sizes, unless compiled code is valid for them."""
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
        wanted = set(keys)
        self._compiled = {key: code for key, code in self._compiled.items() if key in wanted}
        self._tried &= wanted

    def bind(self, calls: Sequence[SizedCall]) -> None:
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
        """The compiled code that is valid for the sizes of a call."""
        values = call.values if call.region.sizes else None
        return next((code for code in self._compiled.get(call.region.key, ()) if code.holds(values)), None)

    def _for_all_sizes(self, region: Region) -> list[_Code]:
        """Compile a region with symbolic sizes; an empty list if the compiler raises, as it may support single sizes."""
        try:
            run = self._quietly(region)
        except Exception as error:  # a compiler may raise anything
            _LOG.info("%s is compiled for each size: %s: %s", region.title, type(error).__name__, error)
            return []
        return [_Code(run, symbols=run.symbols if isinstance(run, CompiledRegion) else None)]

    def _quietly(self, region: Region) -> Run:
        """Compile in one thread at a time: warning filters, Inductor's tables and its folder are process-wide."""
        with alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a compiler's warnings about its own code
            return self._compile(region)

    def _run(self, region: Region) -> Run:
        """Compile a region. If the compiler raises, warn, log the traceback, and render the region to run eagerly."""
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
    """The values of the region's size inputs."""
    return tuple(map(call.values, call.region.sizes.values())) if call.values is not None else ()
