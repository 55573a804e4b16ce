"""The share of the time in which a training on GPUs that fail makes progress, and how often to save.

Contract: each GPU, with its part of host and network, fails on its own, on average every `mtbf_hours` (an exponential
distribution). A failure stops the job: it starts anew in `restart_seconds` (to notice, replace and load) and repeats the steps
since the last save. Saves and restarts may fail, too. The training stands still for `save_seconds` in a save.

The interval and the share are those of J. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
(2006), equations 37 and 20. Its first term, sqrt(2 * save * seconds between failures), is Young's of 1974.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from graphpp.arguments import COUNT, require
from graphpp.devices.efficiency import FROM_ZERO, PEAK
from graphpp.errors import ScheduleError
from graphpp.units import spell_time

_HOUR = 3600


@dataclass(frozen=True)
class Goodput:
    """A training of `gpus` GPUs whose step takes `step_seconds`. `mtbf_hours`: mean hours between failures of one GPU (about
    50,000 in the training of Llama 3 405B, arXiv 2407.21783); `save_seconds`, `restart_seconds`: as this file's head says.
    Raises `ScheduleError` for numbers below 0, or 0 of the first three."""

    step_seconds: float
    gpus: int
    mtbf_hours: float
    save_seconds: float
    restart_seconds: float

    def __post_init__(self) -> None:
        require(ScheduleError, "gpus", COUNT, self.gpus)
        for name in ("step_seconds", "mtbf_hours"):
            require(ScheduleError, name, PEAK, getattr(self, name))
        for name in ("save_seconds", "restart_seconds"):
            require(ScheduleError, name, FROM_ZERO, getattr(self, name))

    @property
    def failure_seconds(self) -> float:
        """Mean seconds between failures of the job."""
        return self.mtbf_hours * _HOUR / self.gpus

    @property
    def steps(self) -> int:
        """Steps from one save to the next for the largest `share`."""
        save, mean = self.save_seconds, self.failure_seconds
        part = save / (2 * mean)
        best = sqrt(2 * save * mean) * (1 + sqrt(part) / 3 + part / 9) - save if part < 1 else mean
        return max(1, round(best / self.step_seconds))

    @property
    def share(self) -> float:
        """The share of the time that makes progress, with a save every `steps` steps: between 0 and 1."""
        mean, work = self.failure_seconds, self.steps * self.step_seconds
        whole = (work + self.save_seconds) / mean
        return work / mean * exp(-self.restart_seconds / mean - whole) / -expm1(-whole)

    def __str__(self) -> str:
        every = f"{self.steps} steps ({spell_time(self.steps * self.step_seconds, 's')})"
        failure = f"{self.failure_seconds / _HOUR:,.1f} hours"
        return f"{self.share:.1%} of the time makes progress: a save every {every}, a failure every {failure}"
