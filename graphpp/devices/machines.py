"""Machines of equal devices: seconds of collectives and messages between their ranks.

Collectives are priced as rings, with the latency of every hop. No network is shared: each rank has `between.bandwidth` for
itself. Rank r is in machine r // per_machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import ceil, log, log2, sqrt

from graphpp.arguments import BYTES, COUNT, TEXT, Accepted, checked, one_of, or_none, require
from graphpp.devices.device import Device, Link
from graphpp.devices.efficiency import FROM_ZERO, PEAK
from graphpp.devices.known import KNOWN_NAMES, known_device
from graphpp.errors import ScheduleError

_MESSAGE = Accepted("a number of bytes from 0", FROM_ZERO.accepts)


def _per_machine(gpus: int) -> Accepted:
    """The valid numbers of devices in each machine for `gpus` devices."""
    return Accepted(
        f"a divisor of gpus, here of {gpus}, or a number above it",
        lambda value: COUNT.accepts(value) and (value >= gpus or gpus % value == 0),  # type: ignore[operator]
    )


def _distinct(places: int, chosen: int) -> float:
    """The expected number of distinct places of `chosen` random ones, over `chosen`."""
    return places * (1 - (1 - 1 / places) ** chosen) / chosen


@dataclass(frozen=True)
class Machines:
    """`gpus` devices, `per_machine` in each machine; `inside`, `between`: the links of a rank (None: the device's usual ones).

    `per_machine` divides `gpus`, or is larger (one machine). The bytes of a collective are those of the whole value: of an
    all-gather the result, of a reduce-scatter the argument, of an all-to-all all bytes on one rank. A group has `ranks` ranks,
    `stride` apart. `host_memory`: bytes of a machine's own memory for offloaded values; `host_bandwidth`: bytes/s in each
    direction between this memory and all devices of the machine together. Raises `ScheduleError` for other values.
    """

    device: Device
    gpus: int
    per_machine: int = 8
    inside: Link = field(default=None)  # type: ignore[assignment] # the device's own, once made
    between: Link = field(default=None)  # type: ignore[assignment]
    host_memory: int = 16 * 10**11  # of 2 TB, as usual beside eight H100
    host_bandwidth: float = 300e9  # half of 16 channels of DDR5-4800, which both directions share

    def __post_init__(self) -> None:
        require(ScheduleError, "device", one_of(Device, takes="a graphpp.devices.Device"), self.device)
        require(ScheduleError, "gpus", COUNT, self.gpus)
        require(ScheduleError, "per_machine", _per_machine(self.gpus), self.per_machine)
        require(ScheduleError, "host_memory", BYTES, self.host_memory)
        require(ScheduleError, "host_bandwidth", PEAK, self.host_bandwidth)
        for name in ("inside", "between"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.device, name))
            require(ScheduleError, name, one_of(Link, takes="a graphpp.devices.Link, or None"), getattr(self, name))

    @classmethod
    @checked(ScheduleError, text=TEXT)
    def read(cls, text: str) -> Machines:
        """Machines from "<count>x<device>", such as "512xH100", with 8 devices in each machine; up to 8 are one machine.

        Devices: H100 (also H100_SXM), H200, A100, B200, MI300X, CPU, with a power limit or none ("512xH100@500W"), or a file
        "mine.json" for `Device.load`. Raises `GraphPPError` for other texts, counts and files.
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

    @property
    def host(self) -> Link | None:
        """The link of one device to its host's memory while all devices of the machine copy; None: no offloading."""
        link, sharing = self.device.host, min(self.gpus, self.per_machine)
        if link is None:
            return None
        return replace(link, bandwidth=min(link.bandwidth, self.host_bandwidth / sharing / link.share))

    @property
    def slowest(self) -> float:
        """Seconds of a kernel on the slowest of all devices over those on a usual one, for normally distributed seconds."""
        return 1 + self.device.spread * sqrt(2 * log(self.gpus))

    def contention(self, ranks: int, stride: int = 1) -> float:
        """Seconds that computations lose per second of a collective of the group beside them."""
        return self.link(ranks, stride).contention

    def all_reduce(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has the sum over all: a reduce-scatter and an all-gather, as rings or trees of machines."""
        local = self._local(ranks, stride)
        tree = (local - 1) * self.inside.latency + ceil(log2(ranks // local)) * self.between.latency
        return 2 * (self._moved(nbytes, ranks, stride) + min(tree, self._hops(ranks, stride))) if nbytes else 0.0

    def all_gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has the values of all: a ring of all ranks, which enters each machine once."""
        return self._moved(nbytes, ranks, stride) + self._hops(ranks, stride) if nbytes else 0.0

    def reduce_scatter(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has its part of the sum: an all-gather in reverse."""
        return self.all_gather(nbytes, ranks, stride)

    def all_to_all(self, nbytes: float, ranks: int, stride: int = 1, chosen: int | None = None) -> float:
        """Seconds until each rank has sent every other its equal part; links within and between machines are busy together.

        `chosen`: the parts are of tokens that each choose so many experts at random, and a token travels once to each machine,
        and there once to each rank (None: once to each expert).
        """
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        require(ScheduleError, "chosen", or_none(COUNT), chosen)
        local = self._local(ranks, stride)
        if not nbytes or ranks == 1:
            return 0.0
        machines = ranks // local
        to_machines, to_ranks = (_distinct(each, chosen) if chosen else 1.0 for each in (machines, ranks))
        across = self.between.seconds(nbytes * to_machines * (machines - 1) / machines)
        inside = self.inside.seconds(nbytes * to_ranks * (local - 1) / (ranks if chosen is None else local))
        return max(inside, across) + self.link(ranks, stride).latency

    def send(self, nbytes: float, stride: int = 1) -> float:
        """Seconds of a message to the rank `stride` further; 0 without bytes."""
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        link = self.link(2, stride)
        return link.latency + link.seconds(nbytes) if nbytes else 0.0

    def _moved(self, nbytes: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather's bytes: the parts of one rank of each machine between machines, then all of them inside."""
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        local = self._local(ranks, stride)
        across = self.between.seconds(nbytes / local * (1 - local / ranks))
        return self.inside.seconds(nbytes * (local - 1) / local) + across

    def _hops(self, ranks: int, stride: int) -> float:
        """Seconds of the latencies of a ring."""
        machines = ranks // self._local(ranks, stride)
        return (ranks - machines) * self.inside.latency + (machines - 1) * self.between.latency

    def _local(self, ranks: int, stride: int) -> int:
        """How many ranks of the group are in one machine: a divisor of `ranks`."""
        require(ScheduleError, "ranks", COUNT, ranks)
        require(ScheduleError, "stride", COUNT, stride)
        most = max(1, min(ranks, self.per_machine // stride))
        return next(each for each in range(most, 0, -1) if ranks % each == 0)
