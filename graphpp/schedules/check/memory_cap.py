"""Refuse a table under which more bytes are alive on a rank than it may hold.

Contract: the bytes are those of `step_memory.py`; the `ScheduleError` shows the column of the rank's peak, the bytes by kind,
and what would take fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.errors import ScheduleError
from graphpp.schedules.check.schedule_under_check import Position, ScheduleUnderCheck
from graphpp.schedules.check.step_memory import MicrobatchCosts, StepPeak, step_peaks
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.state_bytes import HeldBytes


def check_memory(
    subject: ScheduleUnderCheck,
    costs: MicrobatchCosts,
    cap: int | Sequence[int],
    offloaded: Sequence[OffloadWindow] = (),
    held: Sequence[HeldBytes] = (),
) -> None:
    """Raise `ScheduleError` at the peak of a rank with more than `cap` bytes alive; `cap`: for all ranks, or one for each."""
    caps = [cap] * subject.schedule.ranks if isinstance(cap, int) else list(cap)
    if len(caps) != subject.schedule.ranks:
        raise ScheduleError(f"memory_cap has bytes for {len(caps)} ranks, but {subject.schedule.ranks} run the schedule")
    for peak, most in zip(step_peaks(subject.schedule, costs, held, offloaded), caps, strict=True):
        if peak.nbytes > most:
            what = f"{_spelled(peak)}, more than the cap of {most:,}"
            raise subject.refusal(Position(peak.rank, peak.column), what, _remedy(peak))


def _spelled(peak: StepPeak) -> str:
    """`5 bytes are alive here (2 of weights, 3 of activations)`; of one kind alone: `3 bytes of activations are alive here`."""
    parts = {kind: nbytes for kind, nbytes in peak.parts.items() if nbytes}
    if len(parts) == 1:
        return f"{peak.nbytes:,} bytes of {next(iter(parts))} are alive here"
    return f"{peak.nbytes:,} bytes are alive here ({', '.join(f'{nbytes:,} of {kind}' for kind, nbytes in parts.items())})"


def _remedy(peak: StepPeak) -> str:
    """The changes that would take fewer bytes: of activations, and of the state where there is any."""
    order = "run a backward, or a held back W, earlier, or forwards later, or recompute in these stages"
    if not any(nbytes for kind, nbytes in peak.parts.items() if kind != "activations"):
        return order
    return (
        "for fewer activations take another schedule (V-Min, 1F1B), recompute (memory.recompute) or smaller microbatches; for "
        "fewer weights and gradients more stages on more ranks, or shards (dp_shard) with a smaller parallel.keep; if the "
        "optimizer keeps other bytes, say so in memory.optimizer"
    )
