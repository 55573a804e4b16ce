"""How far measured steps were from predicted ones, by kind of training, in the runs of benchmarks/published.

`python benchmarks/published.py --group` measures these figures anew; benchmarks/results/published.md has the runs.
"""

from __future__ import annotations

from collections.abc import Mapping

_DEVICES = ("A100", "H100_SXM", "H200")  # of the published runs
ERRORS: Mapping[str, tuple[float, float]] = {
    "experts": (0.87, 1.36),
    "pipeline": (0.94, 1.10),
    "data parallel": (0.92, 1.14),
}
"""By kind, the 10th and 90th percentile of measured over predicted seconds of a step."""


def kind_of(experts: bool, pipeline: bool) -> str:
    """The kind of a training: of a mixture of experts; otherwise whether it has several pipeline ranks."""
    return "experts" if experts else "pipeline" if pipeline else "data parallel"


def error_of(device: str, experts: bool, pipeline: bool) -> tuple[float, float] | None:
    """The percentiles for a training on devices of this name; None for devices that no published run had."""
    return ERRORS[kind_of(experts, pipeline)] if device.partition("@")[0] in _DEVICES else None
