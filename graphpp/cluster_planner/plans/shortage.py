"""Why no plan fits: what the closest one is short of, how much of it is state, and from how many GPUs a plan fits."""

from __future__ import annotations

from collections.abc import Callable

from graphpp.cluster_planner.plans.predict_step import Prediction
from graphpp.errors import NoPlanError
from graphpp.units import spell_bytes

_STATE = ("shards", "weights", "gradients", "optimizer", "buffers")


def no_plan(closest: Prediction, cap: float, fits_from: Callable[[], str] = lambda: "") -> NoPlanError:
    """The error for the closest prediction. `fits_from`: a sentence on more GPUs."""
    memory = closest.memory
    state = min(closest.peak, sum(memory.get(kind, 0) for kind in _STATE))  # the most of each kind may come at different times
    kinds = ", ".join(f"{kind} {spell_bytes(nbytes)}" for kind, nbytes in memory.items() if nbytes)
    smaller = "" if state > cap else "a smaller batch, "
    return NoPlanError(
        f"memory_cap={cap:,} bytes: no plan fits; the closest, {closest.setting}, takes {spell_bytes(closest.peak)} on its "
        f"fullest rank, {spell_bytes(closest.peak - int(cap))} too much: {spell_bytes(state)} of it are state"
        f"{', which alone is over the cap' if state > cap else ''} ({kinds}): take more GPUs, {smaller}or GPUs with more memory"
        f"{fits_from()}"
    )
