"""Say why one plan is not the best: the bytes that it lacks, or the part of the step in which it loses most.

Contract: `reason_of(each, best, cap)` -> a short text, for two predictions of one question.
"""

from __future__ import annotations

from dataclasses import fields

from graphpp.cluster_planner.plans.predict import Prediction
from graphpp.units import spell_bytes, spell_time

_WORDS = {
    "forward": "forwards", "backward": "backwards", "recompute": "recomputation", "collectives": "collectives of tp, ep and cp",
    "bubble": "idle time", "gradients": "gathers and reductions", "optimizer": "the optimizer",
    "offload": "copies to and from the host",
}  # fmt: skip


def reason_of(each: Prediction, best: Prediction, cap: int) -> str:
    """Why `each` is not the best under a cap of bytes."""
    if each.peak > cap:
        kind = max(each.memory, key=lambda name: each.memory[name] - best.memory.get(name, 0))
        return f"{spell_bytes(each.peak - cap)} over the cap, most of it {kind}"
    slower = each.seconds.total / best.seconds.total - 1
    if slower <= 1e-9:
        more = each.peak - best.peak
        return f"as fast, with {spell_bytes(more)} more" if more > 0 else "as fast"
    lost = {item.name: getattr(each.seconds, item.name) - getattr(best.seconds, item.name) for item in fields(each.seconds)}
    name = max(lost, key=lambda each: lost[each])
    return f"slower by {slower:.1%}: {spell_time(lost[name], 's')} more {_WORDS[name]}"
