"""The seconds for which computations that gather single layers wait, against sums by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from graphpp.cluster_planner.costs.price import PhaseBytes, PricedModel
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.single_layers import LayerGathers
from graphpp.devices import Machines
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts

LAYERS = (StageCosts(3, 4, 5, saved_bytes=0), StageCosts(6, 7, 8, saved_bytes=0))


class _Line:
    """Machines that move one byte of a gather or a sum in a second, which `share` seconds of a computation are lost to."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = share

    def all_gather(self, nbytes: float, ranks: int, stride: int) -> float:
        return nbytes

    def contention(self, ranks: int, stride: int) -> float:
        return self.share


@dataclass(frozen=True)
class _Segments:
    costs: Costs


@dataclass(frozen=True)
class _Priced:
    segments: _Segments
    layers: Sequence[dict[Kind, PhaseBytes]]


def _phases(read: int, made: int, derived: float = 0.0) -> dict[Kind, PhaseBytes]:
    """A layer whose I makes nothing, and whose W reads nothing."""
    both = PhaseBytes(read=read, made=made, derived=derived)
    forward = PhaseBytes(read=read, derived=derived)
    return {Kind.F: forward, Kind.B: both, Kind.I: PhaseBytes(read=read), Kind.W: PhaseBytes(made=made)}


def test_a_computation_waits_for_its_first_gather_its_last_sum_and_for_what_takes_longer_than_its_layers() -> None:
    priced = _Priced(_Segments(Costs(LAYERS)), [_phases(read=10, made=12), _phases(read=20, made=24)])
    of_two = LayerGathers([cast("Machines", _Line())] * 2, MeshShape(dp_shard=2), cast("PricedModel", priced), (0,))
    # F gathers 10, computes 3 while it gathers 20, and computes 6. B gathers 20, computes 7 + 8 while it gathers 10, computes
    # 4 + 5 while it sums 24, and sums 12. I of the first stage gathers nothing. W is as B, beside computations of 8 and 5.
    [both] = of_two.costs(Costs((StageCosts(9, 11, 13, saved_bytes=0),))).stages
    assert both.forward == 10 + 20 + 6
    assert both.of(Kind.B) == 20 + 15 + 24 + 12
    assert both.input_grad == 11
    assert both.weight_grad == 20 + 10 + 24 + 12
    # the gather of 20 lasts 17 longer than the computation beside it, which loses 0.9 * 20 to it
    slower = replace(of_two, machines=[cast("Machines", _Line(0.9))])
    [slowed] = slower.costs(Costs((StageCosts(9, 11, 13, saved_bytes=0),))).stages
    assert slowed.forward == 10 + 3 + 18 + 6
    # gradients of twice the bytes as sent, and two seconds of casts of each layer's weights
    casts = _Priced(priced.segments, [_phases(10, 12, 2.0), _phases(20, 24, 2.0)])
    doubled = replace(of_two, priced=cast("PricedModel", casts), width=2.0)
    [wide] = doubled.costs(Costs((StageCosts(9, 11, 13, saved_bytes=0),))).stages
    assert (wide.forward, wide.of(Kind.B)) == (both.forward + 4, 20 + 15 + 48 + 24 + 4)
    first, second = replace(of_two, cut=(0, 1)).costs(Costs(LAYERS)).stages
    assert (first.forward, second.forward) == (10 + 3, 20 + 6)
    assert (first.of(Kind.B), second.of(Kind.B)) == (10 + 9 + 12, 20 + 15 + 24)
    assert (first.input_grad, second.input_grad) == (4, 20 + 7)
    assert (first.weight_grad, second.weight_grad) == (10 + 5 + 12, 8 + 24)
