"""Devices, links and machines: known figures, the seconds of collectives worked out by hand, and refused values."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch

import graphpp
from graphpp.devices import A100, B200, CPU_CORE, H100_SXM, H200, MI300X, Curve, Device, Efficiency, Link, Machines
from graphpp.devices.device import DTYPES, TORCH_TYPES
from graphpp.errors import ScheduleError

EVEN = Machines(
    Device("even", {"bfloat16": 1e12}, 1e12, 10**9), gpus=64, inside=Link(0.0, 100.0, 1.0), between=Link(0.0, 10.0, 1.0)
)


@pytest.mark.parametrize("device", [H100_SXM, H200, A100, B200, MI300X, CPU_CORE])
def test_figures_are_of_dense_arithmetic_and_in_order(device: Device) -> None:
    assert device.peak("bfloat16") >= device.peak("float32") > 0
    if "float8_e4m3fn" in device.flops:
        assert device.peak("float8_e4m3fn") == pytest.approx(2 * device.peak("bfloat16"), rel=0.01)
    assert device.memory_bandwidth < device.peak("bfloat16")


def test_known_figures() -> None:
    assert (H100_SXM.peak("bfloat16"), H100_SXM.memory_bandwidth, H100_SXM.memory) == (989e12, 3.35e12, 80 * 10**9)
    assert (A100.peak("bfloat16"), A100.inside.bandwidth) == (312e12, 300e9)
    assert (B200.inside.bandwidth, MI300X.memory) == (900e9, 192 * 10**9)


@pytest.mark.parametrize(
    ("sizes", "low", "high"), [((4096, 8192, 8192), 700e12, 780e12), ((1024, 1024, 1024), 200e12, 400e12)]
)
def test_products_on_an_h100_reach_measured_rates(sizes: tuple[int, int, int], low: float, high: float) -> None:
    rows, columns, inner = sizes
    share = H100_SXM.efficiency.product.at(2 * rows * columns * inner) * H100_SXM.efficiency.narrow.at(min(sizes))
    assert low < H100_SXM.peak("bfloat16") * share < high


@pytest.mark.parametrize(("rows", "experts", "rate"), [((512, 1536, 2048), 128, 160e12), ((512, 8192, 5120), 16, 535e12)])
def test_grouped_products_on_an_h100_reach_published_rates(rows: tuple[int, int, int], experts: int, rate: float) -> None:
    one = 2 * prod(rows)
    seconds = H100_SXM.seconds(experts * one, 0.0, "bfloat16", "grouped", min(rows), one)
    assert experts * one / seconds == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("text", "device", "gpus"),
    [
        ("512xH100", H100_SXM, 512),
        ("8 x h200", H200, 8),
        ("16xMI300X", MI300X, 16),
        ("2xH100_SXM", H100_SXM, 2),
        ("4xcpu", CPU_CORE, 4),
        ("60xH100", H100_SXM, 60),
    ],
)
def test_machines_are_read(text: str, device: Device, gpus: int) -> None:
    found = Machines.read(text)
    assert (found.device, found.gpus, found.per_machine) == (device, gpus, 8)
    assert (found.inside, found.between) == (device.inside, device.between)


@pytest.mark.parametrize("text", ["", "H100", "0xH100", "8xTPU", "x8", "8xxH100", "-8xH100", "99999999xH100"])
def test_unknown_machines_name_the_known_ones(text: str) -> None:
    with pytest.raises(ScheduleError, match="A100, B200, CPU_CORE, H100_SXM, H200, MI300X"):
        Machines.read(text)


def test_a_group_within_a_machine_uses_the_link_within() -> None:
    assert EVEN.link(8) is EVEN.inside
    assert EVEN.link(9) is EVEN.link(2, 8) is EVEN.link(4, 4) is EVEN.between
    assert EVEN.link(2, 4) is EVEN.inside


def test_seconds_of_rings() -> None:
    assert EVEN.all_gather(800, 8) == pytest.approx(800 * 7 / 8 / 100)
    assert EVEN.all_reduce(800, 8) == pytest.approx(2 * 800 * 7 / 8 / 100)
    assert EVEN.all_gather(800, 4, 8) == pytest.approx(800 * 3 / 4 / 10)
    # two machines: each rank passes its eighth of the value between them, then the machine's half goes around inside
    assert EVEN.reduce_scatter(1600, 16) == pytest.approx(1600 * 7 / 8 / 100 + 1600 / 8 * 1 / 2 / 10)
    assert EVEN.all_gather(800, 1) == EVEN.all_reduce(0, 8) == EVEN.all_to_all(800, 1) == 0


def test_rings_take_a_hop_for_every_rank_and_large_sums_a_tree() -> None:
    hops = replace(EVEN, inside=Link(1.0, 1e30), between=Link(100.0, 1e30))
    assert hops.all_gather(1, 8) == pytest.approx(7)
    assert hops.all_gather(1, 16) == pytest.approx(14 + 100)
    assert hops.all_gather(1, 4, 8) == pytest.approx(3 * 100)
    assert hops.all_reduce(1, 8) == pytest.approx(2 * 7)
    assert replace(hops, gpus=512).all_reduce(1, 512) == pytest.approx(2 * (7 + 6 * 100)), "64 machines in a tree of 6 levels"


def test_the_last_machine_may_be_filled_in_part() -> None:
    dozen = replace(EVEN, gpus=12)  # 8 and 4
    # the second machine lacks two thirds of the value, which come over the links of its four ranks
    assert dozen.all_gather(1200, 12) == pytest.approx(1200 * 7 / 8 / 100 + 1200 / 4 * 2 / 3 / 10)
    assert dozen.all_to_all(1200, 12) == pytest.approx(1200 * 8 / 12 / 10)
    assert dozen.link(12) is dozen.between and dozen.link(4) is dozen.inside
    # ranks 0, 4 and 8: the third one alone receives what the other two have
    assert dozen.all_gather(1200, 3, 4) == pytest.approx(1200 * 1 / 2 / 100 + 1200 * 2 / 3 / 10)
    hops = replace(dozen, inside=Link(1.0, 1e30), between=Link(100.0, 1e30))
    assert hops.all_gather(1, 12) == pytest.approx(10 + 100)
    assert hops.all_reduce(1, 12) == pytest.approx(2 * (7 + 100))


def groups_of(gpus: int, ranks: int, stride: int) -> list[list[int]]:
    """The groups along a dimension of a mesh of all GPUs."""
    mesh = torch.arange(gpus).reshape(-1, ranks, stride).transpose(1, 2).reshape(-1, ranks)
    return mesh.tolist()


@pytest.mark.parametrize(("gpus", "per_machine"), [(60, 8), (12, 8), (20, 6), (36, 8), (90, 72), (24, 8), (48, 8), (6, 8)])
def test_a_group_is_priced_where_its_ranks_are(gpus: int, per_machine: int) -> None:
    machines = replace(EVEN, gpus=gpus, per_machine=per_machine)
    divisors = [each for each in range(1, gpus + 1) if gpus % each == 0]
    for ranks, stride in ((ranks, stride) for ranks in divisors for stride in divisors if gpus % (ranks * stride) == 0):
        counts = [Counter(rank // per_machine for rank in group) for group in groups_of(gpus, ranks, stride)]
        least = min(min(each.values()) for each in counts)
        across = 1000 / least * (1 - least / ranks) / 10
        most = {max(each.values()) for each in counts if min(each.values()) == least}
        inside = [1000 * (each - 1) / each / 100 for each in most]
        assert any(machines.all_gather(1000, ranks, stride) == pytest.approx(each + across) for each in inside)
        crosses = any(len(each) > 1 for each in counts)
        assert machines.link(ranks, stride) is (machines.between if crosses else machines.inside)


@pytest.mark.parametrize("gpus", [6, 8, 24, 64, 768])
def test_groups_that_fill_machines_or_parts_of_them_have_equal_parts(gpus: int) -> None:
    machines = replace(EVEN, gpus=gpus)
    sizes = [(2**ranks, 2**stride) for ranks in range(7) for stride in range(4)] + [(3, 8), (12, 8), (48, 4), (24, 1), (5, 16)]
    for ranks, stride in sizes:
        local = max(each for each in range(1, ranks + 1) if ranks % each == 0 and each <= max(1, 8 // stride))
        across = machines.between.seconds(1000 / local * (1 - local / ranks))
        assert machines.all_gather(1000, ranks, stride) == machines.inside.seconds(1000 * (local - 1) / local) + across


def test_a_power_limit_slows_arithmetic_and_not_memory() -> None:
    half = H100_SXM.limited(350)
    assert half.limit == 350 and half.power == 700 and half.memory_bandwidth == H100_SXM.memory_bandwidth
    share = half.efficiency.product.at(1e11) / H100_SXM.efficiency.product.at(1e11)
    assert share == pytest.approx(((0.5 - 0.3) / 0.7) ** (1 / 3)), "above 30 %, power grows with the cube of the clock"
    assert half.efficiency.attention.at(1e11) == pytest.approx(share * H100_SXM.efficiency.attention.at(1e11))
    assert half.efficiency.traffic == H100_SXM.efficiency.traffic
    assert H100_SXM.limited(900) == H100_SXM, "a limit above the device's own changes nothing"


def test_the_slowest_of_many_devices_is_slower_than_one() -> None:
    seconds = [Machines(H100_SXM, gpus).slowest for gpus in (1, 8, 64, 4096)]
    assert seconds[0] == 1.0 and seconds == sorted(seconds)
    assert seconds[2] == pytest.approx(1 + 0.015 * math.sqrt(2 * math.log(64)))


def test_seconds_of_messages_and_all_to_alls() -> None:
    assert EVEN.send(100) == 1.0
    assert EVEN.send(100, 8) == 10.0
    assert EVEN.all_to_all(800, 8) == pytest.approx(800 * 7 / 8 / 100)
    assert EVEN.all_to_all(1600, 16) == pytest.approx(1600 / 2 / 10)


def test_a_message_crosses_machines_where_any_of_its_ranks_does() -> None:
    """Of three blocks of 4 ranks on machines of 8, the first two share a machine, and the second and the third do not."""
    assert [EVEN.message(100, first, first + 4, 4) for first in (0, 4, 8)] == [1.0, 10.0, 1.0]
    assert EVEN.message(100, 8, 0, 4) == 10.0, "from the last rank of a loop to the first"


def test_links_between_pods_are_shared_by_all_ranks_of_a_pod() -> None:
    """Two pods of 32 devices in four machines; eight devices leave a pod as fast as one device sends within it."""
    pods = replace(EVEN, pod=32, oversubscription=8.0)
    for ranks, stride in ((32, 1), (8, 4), (2, 16)):
        assert pods.all_reduce(1e4, ranks, stride) == EVEN.all_reduce(1e4, ranks, stride), "within a pod"
    assert pods.send(100, 8) == 10.0 and pods.send(100, 32) == 80.0
    assert [pods.message(100, first, first + 8, 8) for first in (16, 24, 32)] == [10.0, 20.0, 10.0]
    assert [pods.message(100, 32 - width, 32, width) for width in (1, 4, 32)] == [10.0, 10.0, 80.0], "8 of 32 links"
    # A ring of all 64 ranks leaves each machine over eight links, and each pod over four: half as fast.
    across = 64e3 / 8 * (1 - 8 / 64) / 10
    assert pods.all_gather(64e3, 64) - EVEN.all_gather(64e3, 64) == pytest.approx(across)
    # Of two ranks in different pods, 32 pairs share the links: 8 times slower.
    assert pods.all_gather(100, 2, 32) == pytest.approx(8 * EVEN.all_gather(100, 2, 32))
    assert pods.all_to_all(6400, 64) == pytest.approx(8 * 6400 / 2 / 10)


def test_a_larger_pod_and_wider_links_between_pods_are_never_slower() -> None:
    """Also where the last pod is filled in part."""

    def seconds(pod: int, oversubscription: float) -> tuple[float, ...]:
        machines = replace(EVEN, pod=pod, oversubscription=oversubscription)
        return machines.all_gather(64e3, 64), machines.all_reduce(64e3, 32, 2), machines.all_to_all(6400, 64)

    for smaller, larger in pairwise(seconds(pod, 8.0) for pod in range(8, 72, 8)):
        assert all(one >= other * (1 - 1e-9) for one, other in zip(smaller, larger, strict=True))
    assert seconds(32, 1.0) == seconds(64, 8.0) < seconds(32, 2.0) < seconds(32, 4.0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(EVEN, pod=12), "pod: take a multiple of the 8 devices"),
        (lambda: replace(EVEN, oversubscription=7.0), "oversubscription: give pod too"),
        (lambda: replace(EVEN, pod=32, oversubscription=0.5), "oversubscription: take a number from 1"),
        (lambda: Device("x", {}, 1e12, 10**9), "flops"),
        (lambda: Device("x", {"bfloat16": -1.0}, 1e12, 10**9), "flops"),
        (lambda: Device("x", {"bfloat16": 1e12}, 0, 10**9), "memory_bandwidth"),
        (lambda: Device("x", {"bfloat16": 1e12}, 1e12, 1.5), "memory"),
        (lambda: Device("x", {"bfloat16": 1e12}, 1e12, 10**9, efficiency=0.5), "efficiency"),
        (lambda: Device("x", {"bfloat16": 1e12}, 1e12, 10**9, launch=-1.0), "launch"),
        (lambda: Efficiency(product=0.7), "efficiency.product"),
        (lambda: Curve(((2.0, 0.5), (1.0, 0.6))), "points"),
        (lambda: Curve(((1.0, 1.5),)), "points"),
        (lambda: Curve(()), "points"),
        (lambda: Link(-1.0, 1e9), "latency"),
        (lambda: Link(0.0, 0.0), "bandwidth"),
        (lambda: Link(0.0, 1e9, 2.0), "share"),
        (lambda: Machines("H100", 8), "device"),
        (lambda: Machines(H100_SXM, 0), "gpus"),
        (lambda: Machines(H100_SXM, 8, per_machine=0), "per_machine"),
        (lambda: Device("x", {"bf16": 1e12}, 1e12, 10**9), "flops: .* with names among float64, .*, got {'bf16': "),
        (lambda: Device("x", {"float16": 1e12}, 1e12, 10**9, torch_type="gpu"), "torch_type: take 'cuda' or 'cpu' or "),
        (lambda: Machines(H100_SXM, 8, inside=3.0), "inside"),
        (lambda: EVEN.all_reduce(-1, 8), "nbytes"),
        (lambda: EVEN.all_reduce(1, 0), "ranks"),
        (lambda: EVEN.send(1, 0), "stride"),
        (lambda: H100_SXM.limited("500"), "watts: take a positive number"),
        (lambda: H100_SXM.limited(500).limited(400), "power: the device H100_SXM@500W has a limit"),
        (lambda: H100_SXM.limited(200), "power: take watts above 210"),
        (lambda: Device("x", {"bfloat16": 1e12}, 1e12, 10**9).limited(300), "power: the device x has no power"),
        (lambda: Link(0.0, 1e9, contention=-0.1), "contention"),
        (lambda: A100.peak("float8_e4m3fn"), "dtype: A100 has peak FLOP/s of bfloat16"),
    ],
)
def test_refused_values_are_named(make: Any, named: str) -> None:
    with pytest.raises(ScheduleError, match=named):
        make()


def test_the_module_is_public_and_imports_no_torch_itself() -> None:
    assert graphpp.devices.H100_SXM is H100_SXM
    assert "torch" not in vars(graphpp.devices)


def test_names_of_dtypes_and_of_devices_are_those_of_torch() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES if name != "tf32")
    assert all(torch.device(name).type == name for name in TORCH_TYPES)


@pytest.mark.parametrize("text", ["H100@500W", " h100 @ 500 w", "H100_SXM@500.0W"])
def test_a_power_limit_stands_behind_the_name(text: str) -> None:
    limited = Machines.read(f"8x{text}").device
    assert limited == H100_SXM.limited(500) and limited.name == "H100_SXM@500W"


@pytest.mark.parametrize(("text", "message"), [("H100@", "devices are"), ("H100@fast", "devices are"), ("H100@100W", "210")])
def test_a_power_limit_that_no_device_has_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Machines.read(f"8x{text}")


def test_a_token_that_travels_once_to_each_machine_sends_fewer_bytes() -> None:
    """Two machines of eight: of 8 random experts on 16 ranks, 4 are far in the mean, on the other machine with 1 - 2 ** -8."""
    plain, once = EVEN.all_to_all(1600, 16), EVEN.all_to_all(1600, 16, chosen=8)
    assert plain == pytest.approx(1600 / 2 / 10)
    assert once == pytest.approx(1600 * (2 * (1 - 0.5**8) / 8) / 2 / 10)
    near = 16 * (1 - (15 / 16) ** 8) / 8
    fast = replace(EVEN, between=Link(0.0, 1e9))
    assert fast.all_to_all(1600, 16, chosen=8) == pytest.approx(1600 * near * 7 / 8 / 100), "inside, once to each rank"
    assert EVEN.all_to_all(800, 8, chosen=1) == pytest.approx(EVEN.all_to_all(800, 8))
    with pytest.raises(ScheduleError, match="chosen"):
        EVEN.all_to_all(800, 8, chosen=0)
