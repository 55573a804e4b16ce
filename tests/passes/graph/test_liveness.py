"""The peak bytes of a program: computed by hand, and measured while a program runs."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from graphpp.passes.graph.liveness import live_bytes
from graphpp.passes.lower import LoweringOptions, lower, lower_assigned
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.runtime import program as p
from graphpp.runtime.program import Phase
from tests.passes.graphs import Hand, assigned, captured, starts

SIZE = 24  # bytes of a [2, 3] float


def test_values_die_after_their_last_reader_and_results_do_not() -> None:
    hand = Hand("w0")
    weight = hand.input(p.Parameter("w0"))
    a = hand.node("a", "F0", weight)
    b = hand.node("b", "F0", a)
    c = hand.node("c", "F0", b)  # a is dead
    hand.result(p.Loss(), c)
    hand.result(p.Gradient("w0"), hand.node("d", "B0", c, a))  # a and c are saved
    staged = cut_stages(hand.joint(), 1)
    forward, backward = (staged.graphs[phase, 0].graph for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert max(accumulate(live_bytes(forward))) == 3 * SIZE  # a, b, c
    assert max(accumulate(live_bytes(backward))) == 3 * SIZE  # a and c are saved, d is computed


class Wide(nn.Module):
    """Operations whose values differ much in size, without views of odd strides."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(64, 512, bias=False) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(512, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(x)).exp())
        return x


def test_a_run_allocates_what_was_foretold() -> None:
    joint = captured(Wide(), torch.randn(32, 64))
    values = {role: node.meta["val"] for role, node in joint.inputs().items()}
    made = lower(joint, (0,)).stages[0].programs
    given: dict[Any, Any] = {role: torch.randn(value.shape) for role, value in values.items()}
    forward = made[Phase.FORWARD]
    saved: dict[str, Tensor] = {}
    peak = _allocated(lambda: saved.update(_saved(forward, [given[role] for role in forward.inputs])))
    assert 0.95 * forward.peak_bytes <= peak <= 1.25 * forward.peak_bytes + 4096


def test_the_workspace_of_products_counts_in_the_backward() -> None:
    joint = captured(Wide(), torch.randn(32, 64))
    joint = assigned(joint, *starts(joint, "ups.1"))
    factors = []

    def workspace(a: Tensor, b: Tensor) -> int:
        factors.append((tuple(a.shape), tuple(b.shape)))
        return 10**9

    peaks = [
        lower_assigned(joint, 2, options=LoweringOptions(fuse_grad_accumulation=True, product_workspace=each)).stages[1]
        for each in (None, workspace)
    ]
    without, counted = ([stage.programs[phase].peak_bytes for phase in (Phase.FORWARD, Phase.BACKWARD)] for stage in peaks)
    assert counted[0] == without[0] and 10**9 <= counted[1] <= 10**9 + without[1]
    assert sorted(set(factors)) == [((64, 32), (32, 512)), ((512, 32), (32, 64))]


def _saved(program: p.Program, boxed: list[Any]) -> dict[str, Tensor]:
    results = program.run(boxed)
    return {role.name: value for role, value in zip(program.outputs, results, strict=True) if isinstance(role, p.Saved)}


def _allocated(run: Any) -> int:
    """The most bytes that CPU tensors took while `run` ran, minus the bytes before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run()
    total = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak
