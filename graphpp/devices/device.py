"""One device and its links as figures: seconds of a kernel, and of bytes over a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from graphpp.arguments import BYTES, TEXT, Accepted, one_of, one_word, or_none, require
from graphpp.devices.efficiency import FROM_ZERO, PEAK, SHARE, Curve, Efficiency
from graphpp.errors import ScheduleError
from graphpp.from_json import document, read

DTYPES = (
    "float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
)  # fmt: skip
TORCH_TYPES = ("cuda", "cpu", "xpu", "mps", "mtia", "hpu", "privateuseone")
_FLOPS = Accepted(
    f'a mapping of dtype names to FLOP/s, e.g. {{"bfloat16": 989e12}}, with names among {", ".join(DTYPES)}',
    lambda value: isinstance(value, Mapping) and {*map(_is_rate, value.items())} == {True},
)
_CLOCKED = ("product", "grouped", "attention", "attention_backward")
_STATIC = 0.3  # of a device's power, an assumption: memory, links and leakage, which its clock does not change


def _is_rate(item: tuple[object, object]) -> bool:
    return item[0] in DTYPES and PEAK.accepts(item[1])


@dataclass(frozen=True)
class Link:
    """A link of one rank. `latency`: seconds of one hop; `bandwidth`: bytes/s per direction; `share`: the fraction of it that
    messages reach; `contention`: seconds that computations lose per second of a collective beside them."""

    latency: float
    bandwidth: float
    share: float = 0.8  # NCCL's bus bandwidth in all-reduces over NVLink: 360 to 370 of 450 GB/s
    contention: float = 0.2  # a collective's 24 blocks take a share of an H100's 132 multiprocessors

    def __post_init__(self) -> None:
        for name, accepted in (("latency", FROM_ZERO), ("bandwidth", PEAK), ("share", SHARE), ("contention", FROM_ZERO)):
            require(ScheduleError, name, accepted, getattr(self, name))

    def seconds(self, nbytes: float) -> float:
        """Seconds for `nbytes` to pass, latency not counted."""
        return nbytes / (self.bandwidth * self.share)


_LINK = one_of(Link, takes="a Link")
# In published trainings on 4 GPUs, all computations together took 18.9 % longer beside their collectives, and the sum of both
# 10.2 % longer than overlapped (arXiv 2507.03114, averages): 0.189 / (1.102 * 1.189 - 1) s per second of a collective.
NVLINK, NIC = Link(3e-6, 450e9, contention=0.6), Link(8e-6, 50e9, 0.9)


@dataclass(frozen=True)
class Device:
    """One device. `flops`: dense FLOP/s by name of a torch dtype or "tf32". Raises `ScheduleError` for other values.

    `memory_bandwidth` in bytes/s, `memory` in bytes. `launch`: seconds per kernel in addition to its work; `dispatch`: seconds
    of the host per operator that is not compiled (an assumption). `spread`: standard deviation of the speed of devices of this
    kind, over their mean. `power`: watts at which the figures hold (None: unknown); `limit`: watts, set by `limited`. `inside`,
    `between`: the usual links within a machine and between machines. `torch_type`: torch's device type. `host`: the link to the
    host's memory for offloaded values (None: no offloading).
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory: int
    efficiency: Efficiency = Efficiency()
    launch: float = 3e-6
    dispatch: float = 1e-5
    spread: float = 0.015
    power: float | None = None
    limit: float | None = None
    inside: Link = NVLINK
    between: Link = NIC
    torch_type: str = "cuda"
    host: Link | None = None

    def __post_init__(self) -> None:
        accepted = {
            "name": TEXT, "torch_type": one_word(*TORCH_TYPES), "flops": _FLOPS, "memory_bandwidth": PEAK, "memory": BYTES,
            "launch": FROM_ZERO, "dispatch": FROM_ZERO, "spread": FROM_ZERO, "power": or_none(PEAK), "limit": or_none(PEAK),
            "efficiency": one_of(Efficiency, takes="an Efficiency"), "inside": _LINK, "between": _LINK, "host": or_none(_LINK),
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

    def seconds(
        self, work: float, nbytes: float, dtype: str, kind: str = "product", side: float | None = None, one: float | None = None
    ) -> float:
        """Seconds of a kernel: the launch plus the longer of `work` FLOPs and the traffic of `nbytes`.

        `kind`: the curve of the FLOPs, "product", "grouped", "attention" or "attention_backward". `side`: a product's smallest
        size; `one`: the FLOPs of one of a kernel's products (None: `work`).
        """
        shares, share = self.efficiency, 1.0 if side is None else self.efficiency.narrow.at(max(1.0, side))
        traffic = nbytes / (self.memory_bandwidth * shares.traffic.at(max(nbytes, 1.0)))
        curve: Curve = getattr(shares, kind)
        return self.launch + max(traffic, work / (self.peak(dtype) * (curve.at(one or work) * share)) if work else 0.0)

    def limited(self, watts: float) -> Device:
        """The device under a power limit, which lowers the clock of products and attention and leaves that of the memory.

        Above a static part, power grows with the cube of the clock, because the voltage falls with the clock. Raises
        `ScheduleError` for a device without `power` or with a limit, and for a limit within the static part.
        """
        require(ScheduleError, "watts", PEAK, watts)
        if self.power is None or self.limit is not None:
            lacks = "has no power of its own: give Device(power=) in watts" if self.limit is None else "has a limit"
            raise ScheduleError(f"power: the device {self.name} {lacks}")
        least = _STATIC * self.power
        if not watts > least:
            raise ScheduleError(f"power: take watts above {least:g}, the static part of {self.name}, got {watts:g}")
        if watts >= self.power:
            return self
        clock = ((watts - least) / (self.power - least)) ** (1 / 3)
        curves = {name: getattr(self.efficiency, name).times(clock) for name in _CLOCKED}
        return replace(self, name=f"{self.name}@{watts:g}W", limit=watts, efficiency=replace(self.efficiency, **curves))

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in a dtype. Raises `ScheduleError` for a dtype without a figure."""
        if dtype not in self.flops:
            raise ScheduleError(f"dtype: {self.name} has peak FLOP/s of {', '.join(self.flops)}, not of {dtype}")
        return self.flops[dtype]
