"""Devices, links and machines: the figures that price a plan for other hardware. Imports no torch.

The constants have the figures of public data sheets, dense (without sparsity).

    machines = graphpp.devices.Machines.read("512xH100")
    machines.all_reduce(2**30, ranks=8) # seconds; the ranks are neighbours
    machines.send(2**26, stride=8) # seconds; to the rank 8 further

Collectives are priced as rings within and between machines (`Machines.all_gather`), with the latency of trees. No network is
shared: each rank has `between.bandwidth` for itself. Rank r is in machine r // per_machine.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import ceil, inf, log, log2
from pathlib import Path
from types import MappingProxyType

from graphpp.arguments import BYTES, COUNT, NUMBER, TEXT, Accepted, checked, one_of, one_word, or_none, require
from graphpp.errors import ScheduleError
from graphpp.from_json import document, read

_PEAK = Accepted("a positive number", lambda value: NUMBER.accepts(value) and 0 < value < inf)  # type: ignore[operator]
_FROM_ZERO = Accepted("a number from 0", lambda value: NUMBER.accepts(value) and 0 <= value < inf)  # type: ignore[operator]
_SHARE = Accepted("a number above 0 and up to 1", lambda value: NUMBER.accepts(value) and 0 < value <= 1)  # type: ignore[operator]
_DTYPES = (
    "float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
)  # fmt: skip
_TORCH_TYPES = ("cuda", "cpu", "xpu", "mps", "mtia", "hpu", "privateuseone")
_FLOPS = Accepted(
    f'a mapping of dtype names to FLOP/s, e.g. {{"bfloat16": 989e12}}, with names among {", ".join(_DTYPES)}',
    lambda value: isinstance(value, Mapping) and {*map(_is_rate, value.items())} == {True},
)
_POINTS = Accepted(
    "a sequence of (size, share) with ascending sizes above 0 and shares above 0 and up to 1",
    lambda value: isinstance(value, list | tuple) and _is_curve(value),
)
_MESSAGE = Accepted("a number of bytes from 0", _FROM_ZERO.accepts)


def _is_rate(item: tuple[object, object]) -> bool:
    return item[0] in _DTYPES and _PEAK.accepts(item[1])


def _is_curve(points: object) -> bool:
    try:
        sizes = [size for size, _ in points]  # type: ignore[attr-defined]
        shares = [share for _, share in points]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    fine = bool(sizes) and all(map(_PEAK.accepts, sizes)) and all(map(_SHARE.accepts, shares))
    return fine and all(one < other for one, other in pairwise(sizes))


@dataclass(frozen=True)
class Curve:
    """A fraction as a function of a size: linear between its points over the logarithm of the size, constant outside.

    Raises `ScheduleError` for points that are no curve.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        require(ScheduleError, "points", _POINTS, self.points)

    def at(self, size: float) -> float:
        after = bisect_right(self.points, (size, inf))
        if after in (0, len(self.points)):
            return self.points[min(after, len(self.points) - 1)][1]
        (low, share), (high, other) = self.points[after - 1 : after + 1]
        return share + (other - share) * log(size / low) / log(high / low)

    def times(self, factor: float) -> Curve:
        """The curve with all fractions multiplied, at most 1."""
        return Curve(tuple((size, min(1.0, share * factor)) for size, share in self.points))


@dataclass(frozen=True)
class Efficiency:
    """The fractions of peak that kernels reach, launch time not counted.

    Of peak FLOP/s: `product` by the FLOPs of a matrix product, multiplied by `narrow` of the smallest of its sizes m, n, k;
    `attention` and `attention_backward` by the FLOPs of a fused attention (causal: half). Of memory bandwidth: `traffic` by
    bytes.
    """

    # cuBLAS in bfloat16 on an H100 SXM (published, not measured here): 4096 x 8192 x 8192 (5.5e11 FLOPs) at about 650
    # of 989 TFLOP/s, 4096 ** 3 at 620, 2048 ** 3 at 530, 1024 ** 3 at 300.
    product: Curve = Curve(((1e8, 0.05), (2e9, 0.30), (1.7e10, 0.54), (1.4e11, 0.63), (5.5e11, 0.66)))
    # a tile has 64 to 128 rows and columns: smaller sizes leave a part of it empty
    narrow: Curve = Curve(((8, 0.12), (32, 0.40), (64, 0.65), (128, 0.85), (256, 0.95), (512, 1.0)))
    # FlashAttention 2 and 3, cuDNN, H100, causal, 2k to 8k tokens: 350 to 450 TFLOP/s forward, 300 to 400 backward.
    attention: Curve = Curve(((1e8, 0.05), (1e9, 0.15), (1e10, 0.30), (1e11, 0.40)))
    attention_backward: Curve = Curve(((1e8, 0.05), (1e9, 0.13), (1e10, 0.27), (1e11, 0.36)))
    # pointwise kernels and copies: 80 to 90 % of the bandwidth from 100 MB on; small ones do not fill the device
    traffic: Curve = Curve(((1e5, 0.10), (1e6, 0.35), (1e7, 0.70), (1e8, 0.85), (1e9, 0.90)))

    def __post_init__(self) -> None:
        for name in ("product", "narrow", "attention", "attention_backward", "traffic"):
            require(ScheduleError, f"efficiency.{name}", one_of(Curve, takes="a Curve"), getattr(self, name))


@dataclass(frozen=True)
class Link:
    """A link of one rank: `latency` in seconds, `bandwidth` in bytes/s per direction, `share`: the fraction messages reach."""

    latency: float
    bandwidth: float
    share: float = 0.8  # NCCL's bus bandwidth in all-reduces over NVLink: 360 to 370 of 450 GB/s

    def __post_init__(self) -> None:
        require(ScheduleError, "latency", _FROM_ZERO, self.latency)
        require(ScheduleError, "bandwidth", _PEAK, self.bandwidth)
        require(ScheduleError, "share", _SHARE, self.share)

    def seconds(self, nbytes: float) -> float:
        """Seconds for `nbytes` to pass, latency not counted."""
        return nbytes / (self.bandwidth * self.share)


_INSIDE, _BETWEEN = Link(3e-6, 450e9), Link(8e-6, 50e9, 0.9)
# PCI Express x16, one direction: generation 5 has 64 GB/s before its encoding and packets, generation 4 half of that. Copies
# from and to pinned memory reach some 55 and 25 GB/s in published benchmarks; 55 GB/s were measured on an H200.
_PCIE_5, _PCIE_4 = Link(1e-5, 64e9, 0.85), Link(1e-5, 32e9, 0.8)


@dataclass(frozen=True)
class Device:
    """One device. `flops`: dense FLOP/s by name of a torch dtype or "tf32". Raises `ScheduleError` for other values.

    `memory_bandwidth` in bytes/s, `memory` in bytes, `launch`: seconds per kernel in addition to its work. `inside`, `between`:
    the usual links within a machine and between machines. `torch_type`: torch's device type. `host`: the link to the host's
    memory for offloaded values (None: no offloading).
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: int
    efficiency: Efficiency = Efficiency()
    launch: float = 3e-6
    inside: Link = _INSIDE
    between: Link = _BETWEEN
    torch_type: str = "cuda"
    host: Link | None = None

    def __post_init__(self) -> None:
        accepted = {
            "name": TEXT, "torch_type": one_word(*_TORCH_TYPES), "flops": _FLOPS, "memory_bandwidth": _PEAK, "memory": BYTES,
            "launch": _FROM_ZERO,
            "efficiency": one_of(Efficiency, takes="an Efficiency"),
            "inside": one_of(Link, takes="a Link"), "between": one_of(Link, takes="a Link"),
            "host": or_none(one_of(Link, takes="a Link")),
        }  # fmt: skip
        for name, each in accepted.items():
            require(ScheduleError, name, each, getattr(self, name))
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.flops.items())), self.memory_bandwidth, self.memory))

    def __reduce__(self) -> tuple[type[Device], tuple[object, ...]]:
        values = (getattr(self, each.name) for each in fields(self))
        return type(self), tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    @classmethod
    def load(cls, file: str | Path) -> Device:
        """The device of a file that `graphpp doctor --calibrate` wrote. Raises `GraphPPError` that names a wrong entry."""
        given = document(Path(file), str(file))
        if "device" not in given:
            raise ScheduleError(f"{file}: missing device: take a file that graphpp doctor --calibrate wrote")
        found: Device = read(cls, given["device"], f"{file}: device")
        return found

    def seconds(self, work: float, nbytes: float, dtype: str, kind: str = "product", side: float | None = None) -> float:
        """Seconds of a kernel: the launch plus the longer of `work` FLOPs and the traffic of `nbytes`.

        `kind`: the curve of the FLOPs, "product", "attention" or "attention_backward". `side`: a product's smallest size.
        """
        shares, share = self.efficiency, 1.0 if side is None else self.efficiency.narrow.at(max(1.0, side))
        traffic = nbytes / (self.memory_bandwidth * shares.traffic.at(max(nbytes, 1.0)))
        curve: Curve = getattr(shares, kind)
        return self.launch + max(traffic, work / (self.peak(dtype) * (curve.at(work) * share)) if work else 0.0)

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in a dtype. Raises `ScheduleError` for a dtype without a figure."""
        if dtype not in self.flops:
            raise ScheduleError(f"dtype: {self.name} has peak FLOP/s of {', '.join(self.flops)}, not of {dtype}")
        return self.flops[dtype]


def _flops(half: float, eighth: float | None, tf32: float, single: float) -> dict[str, float]:
    narrow = {} if eighth is None else {"float8_e4m3fn": eighth, "float8_e5m2": eighth}
    return {"bfloat16": half, "float16": half, **narrow, "tf32": tf32, "float32": single}


_FAST = Efficiency()
GB = 10**9  # of a data sheet; 2 ** 30 - 10 ** 9 allows for contexts, communicators and allocator fragments

# NVIDIA H100 SXM5: half of the figures with sparsity; NVLink 4, 900 GB/s both directions together; one 400 Gb/s NIC per GPU.
# Shares, launch and the host's link: kernels of `graphpp doctor --calibrate` on an H100 80 GB HBM3, torch 2.11.0, 2026-11-28.
_HOPPER = Efficiency(
    Curve((
        (2.7e8, 0.095), (2.1e9, 0.378), (1.7e10, 0.691), (3.4e10, 0.652), (1.4e11, 0.729), (5.5e11, 0.750), (1.1e12, 0.643)
    )),
    Curve(((8, 0.191), (32, 0.276), (64, 0.404), (128, 0.609), (256, 0.810), (512, 1.0))),
    Curve(((2.1e9, 0.160), (8.6e9, 0.254), (3.4e10, 0.380), (5.5e11, 0.540))),
    Curve(((5.4e9, 0.119), (2.1e10, 0.202), (8.6e10, 0.307), (1.4e12, 0.486))),
    Curve(((1e6, 0.314), (1e7, 0.678), (1e8, 0.869), (1e9, 0.903))),
)  # fmt: skip
H100_SXM = Device(
    "H100_SXM", _flops(989e12, 1979e12, 494e12, 67e12), 3.35e12, 80 * GB, _HOPPER, 2.1e-6, host=Link(2.2e-6, 64e9, 0.86)
)
# The H100 with HBM3e. Products as cuBLAS ran them in steps of a Llama in bfloat16 on one H200 (gpu_step of RESULTS.md):
# 4096 x 2048 times 2048 x 512, x 2048, x 8192 and x 32768 at 547, 690, 781 and 740 TFLOP/s; all else as for an H100.
H200 = replace(
    H100_SXM, name="H200", memory_bandwidth=4.8e12, memory=141 * GB,
    efficiency=replace(
        _HOPPER, product=Curve(((2.7e8, 0.095), (2.1e9, 0.378), (8.6e9, 0.55), (3.4e10, 0.70), (1.4e11, 0.79), (5.5e11, 0.75)))
    ),
)  # fmt: skip
# NVIDIA A100 80 GB SXM4: NVLink 3, 600 GB/s together; 200 Gb/s for each GPU. Products reach more of the lower peak: 240 to 260
# of 312 TFLOP/s; FlashAttention 2 about 180 forward and 170 backward, causal.
A100 = Device(
    "A100", _flops(312e12, None, 156e12, 19.5e12), 2.039e12, 80 * GB,
    Efficiency(
        _FAST.product.times(1.22), attention=_FAST.attention.times(1.45), attention_backward=_FAST.attention_backward.times(1.5)
    ),
    inside=Link(3e-6, 300e9), between=Link(8e-6, 25e9, 0.9), host=_PCIE_4,
)  # fmt: skip
# NVIDIA HGX B200: 180 GB for each GPU; NVLink 5, 1.8 TB/s together.
B200 = Device(
    "B200", _flops(2250e12, 4500e12, 1125e12, 75e12), 7.7e12, 180 * GB, inside=Link(3e-6, 900e9), between=Link(8e-6, 50e9, 0.9),
    host=_PCIE_5,
)  # fmt: skip
# AMD MI300X: 7 Infinity Fabric links of 64 GB/s each direction. In published benchmarks products reach 600 to 700 of 1307
# TFLOP/s, attention about half the fraction of an H100.
MI300X = Device(
    "MI300X", _flops(1307e12, 2615e12, 654e12, 163e12), 5.3e12, 192 * GB,
    Efficiency(
        _FAST.product.times(0.75), attention=_FAST.attention.times(0.75), attention_backward=_FAST.attention_backward.times(0.6)
    ),
    inside=Link(4e-6, 448e9, 0.7), between=Link(8e-6, 50e9, 0.9), host=_PCIE_5,
)  # fmt: skip
# one core of a server with AVX-512; loopback between processes
CPU_CORE = Device(
    "CPU_CORE", {"float32": 5e10, "bfloat16": 5e10, "float16": 5e10, "float64": 2.5e10}, 1e10, 8 * GB,
    Efficiency(*[Curve(((1.0, 1.0),))] * 5), inside=Link(1e-4, 1e9, 1.0), between=Link(1e-4, 1e9, 1.0), torch_type="cpu",
)  # fmt: skip

_KNOWN: Mapping[str, Device] = {
    "h100": H100_SXM, "h100_sxm": H100_SXM, "h200": H200, "a100": A100, "b200": B200, "mi300x": MI300X,
    "cpu": CPU_CORE, "cpu_core": CPU_CORE,
}  # fmt: skip
KNOWN_NAMES = f"{', '.join(sorted({each.name for each in _KNOWN.values()}))}, H100 and CPU"


def known_device(name: str) -> Device | None:
    """The device of a name in any case; None for other names."""
    return _KNOWN.get(name.strip().lower().replace("-", "_").replace(" ", "_"))


def _per_machine(gpus: int) -> Accepted:
    """The valid numbers of devices in each machine for `gpus` devices."""
    return Accepted(
        f"a divisor of gpus, here of {gpus}, or a number above it",
        lambda value: COUNT.accepts(value) and (value >= gpus or gpus % value == 0),  # type: ignore[operator]
    )


@dataclass(frozen=True)
class Machines:
    """`gpus` devices, `per_machine` in each machine; `inside`, `between`: the links of a rank (None: the device's usual ones).

    `per_machine` divides `gpus`, or is larger (one machine). The bytes of a collective are those of the whole value: of an
    all-gather the result, of a reduce-scatter the argument, of an all-to-all all bytes on one rank. A group has `ranks` ranks,
    `stride` apart. Raises `ScheduleError` for other values.
    """

    device: Device
    gpus: int
    per_machine: int = 8
    inside: Link = field(default=None)  # type: ignore[assignment] # the device's own, once made
    between: Link = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        require(ScheduleError, "device", one_of(Device, takes="a graphpp.devices.Device"), self.device)
        require(ScheduleError, "gpus", COUNT, self.gpus)
        require(ScheduleError, "per_machine", _per_machine(self.gpus), self.per_machine)
        for name in ("inside", "between"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.device, name))
            require(ScheduleError, name, one_of(Link, takes="a graphpp.devices.Link, or None"), getattr(self, name))

    @classmethod
    @checked(ScheduleError, text=TEXT)
    def read(cls, text: str) -> Machines:
        """Machines from "<count>x<device>", such as "512xH100", with 8 devices in each machine; up to 8 are one machine.

        Devices: H100 (also H100_SXM), H200, A100, B200, MI300X, CPU, or a .json file for `Device.load`. Raises `GraphPPError`
        for other texts, counts and files.
        """
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*[xX]\s*(.+?)\s*", text)
        count, name = (int(found[1]), found[2]) if found else (0, "")
        device = Device.load(name) if name.endswith(".json") else known_device(name)
        if device is None or not COUNT.accepts(count):
            raise ScheduleError(
                f'machines: take "<count>x<device>", e.g. "512xH100", got {text!r}: devices are {KNOWN_NAMES}; '
                "or take a .json file of graphpp doctor --calibrate, or make a "
                "graphpp.devices.Machines(graphpp.devices.Device(...), gpus) for another one"
            )
        usual = cls.per_machine
        if count > usual and count % usual:
            full = f'"{count // usual * usual}x{name}" or "{-(-count // usual) * usual}x{name}"'
            own = f"Machines(device, {count}, per_machine=..), or a JSON file of its fields"
            raise ScheduleError(f"machines: {count} devices do not fill machines of {usual}: take {full}; or give {own}")
        return cls(device, count)

    def __str__(self) -> str:
        return f"{self.gpus}x{self.device.name}"

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The slowest link that the group crosses."""
        return self.inside if self._local(ranks, stride) == ranks else self.between

    def all_reduce(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has the sum over all: a reduce-scatter and an all-gather."""
        return self.reduce_scatter(nbytes, ranks, stride) + self.all_gather(nbytes, ranks, stride)

    def all_gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has the values of all: first rings across machines, then rings within machines."""
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        local = self._local(ranks, stride)
        machines = ranks // local
        within = self.inside.seconds(nbytes * (local - 1) / local) + ceil(log2(local)) * self.inside.latency
        across = self.between.seconds(nbytes / local * (machines - 1) / machines) + ceil(log2(machines)) * self.between.latency
        return within + across if nbytes else 0.0

    def reduce_scatter(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has its part of the sum: an all-gather in reverse."""
        return self.all_gather(nbytes, ranks, stride)

    def all_to_all(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has sent every other its equal part; links within and between machines are busy together."""
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        local = self._local(ranks, stride)
        if not nbytes or ranks == 1:
            return 0.0
        across = self.between.seconds(nbytes * (ranks - local) / ranks)
        return max(self.inside.seconds(nbytes * (local - 1) / ranks), across) + self.link(ranks, stride).latency

    def send(self, nbytes: float, stride: int = 1) -> float:
        """Seconds of a message to the rank `stride` further; 0 without bytes."""
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        link = self.link(2, stride)
        return link.latency + link.seconds(nbytes) if nbytes else 0.0

    def _local(self, ranks: int, stride: int) -> int:
        """How many ranks of the group are in one machine: a divisor of `ranks`."""
        require(ScheduleError, "ranks", COUNT, ranks)
        require(ScheduleError, "stride", COUNT, stride)
        most = max(1, min(ranks, self.per_machine // stride))
        return next(each for each in range(most, 0, -1) if ranks % each == 0)
