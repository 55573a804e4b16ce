"""Machines of equal devices: seconds of collectives and messages between their ranks.

Collectives are priced as rings, with the latency of every hop. Each rank has `between.bandwidth` for itself within a pod; all
ranks of a pod share its links to other pods, `oversubscription` times narrower than the sum of theirs. Rank r is in machine
r // per_machine and in pod r // pod; the last ones may be filled in part.

Groups lie as in a mesh of all ranks: they start at multiples of `ranks * stride` and up to `stride - 1` further. All are priced
as the one with the fewest ranks on a machine, whose links carry what the machine lacks.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, log, log2, sqrt
from typing import NamedTuple

from graphpp.arguments import BYTES, COUNT, INDEX, TEXT, Accepted, checked, one_of, or_none, require
from graphpp.devices.device import Device, Link
from graphpp.devices.efficiency import FROM_ZERO, PEAK
from graphpp.devices.known import KNOWN_NAMES, known_device
from graphpp.errors import ScheduleError

_MESSAGE = Accepted("a number of bytes from 0", FROM_ZERO.accepts)
_NARROWER = Accepted("a number from 1", lambda value: PEAK.accepts(value) and value >= 1)  # type: ignore[operator]


class _Spread(NamedTuple):
    """How a group lies on machines: the fewest and the most of its ranks on one of them, and how many machines they are."""

    least: int
    most: int
    machines: int


@cache
def _widest_spread(per_machine: int, ranks: int, stride: int, blocks: int, full: bool) -> _Spread:
    """Of all groups in so many blocks of `ranks * stride` ranks, the one with the fewest ranks on one machine. `full`: the last
    machine is full."""
    block = ranks * stride
    if full and (per_machine % block == 0 or (per_machine % stride == 0 and block % per_machine == 0)):
        local = min(ranks, per_machine // stride)  # machines hold whole blocks, or blocks whole machines
        return _Spread(local, local, ranks // local)
    if stride >= per_machine:
        return _Spread(1, 1, ranks)
    firsts = (at * block + each for at in range(min(blocks, per_machine)) for each in range(stride))
    counts = (Counter((first + each * stride) // per_machine for each in range(ranks)).values() for first in firsts)
    return min((_Spread(min(each), max(each), len(each)) for each in counts), key=lambda each: (each.least, -each.machines))


@cache
def _leaving(pod: int, low: int, distance: int, width: int) -> float:
    """The share of one pod's devices that are among `width` ranks from `low` on and have their peer, `distance` further, in
    another pod: the largest share of all pods."""
    pairs = Counter(rank // pod for rank in range(low, low + width) if rank // pod != (rank + distance) // pod)
    return max(pairs.values(), default=0) / pod


def _distinct(places: int, chosen: int) -> float:
    """The expected number of distinct places of `chosen` random ones, over `chosen`."""
    return places * (1 - (1 - 1 / places) ** chosen) / chosen


@dataclass(frozen=True)
class Machines:
    """`gpus` devices, `per_machine` in each machine; `inside`, `between`: the links of a rank (None: the device's usual ones).

    If `per_machine` does not divide `gpus`, the last machine has the rest. The bytes of a collective are those of the whole
    value: of an all-gather the result, of a reduce-scatter the argument, of an all-to-all all bytes on one rank. A group has
    `ranks` ranks, `stride` apart. `host_memory`: bytes of a machine's own memory for offloaded values; `host_bandwidth`:
    bytes/s in each direction between this memory and all devices of the machine together. `beside`: devices of other groups in
    the same job (`MixedMachines` sets it), among which the slowest one may be. `pod`: devices between which the network has the
    full rate of each (None: all); `oversubscription`: the sum of their rates over that of the links from their pod to others.
    Raises `ScheduleError` for other values.
    """

    device: Device
    gpus: int
    per_machine: int = 8
    inside: Link = field(default=None)  # type: ignore[assignment] # the device's own, once made
    between: Link = field(default=None)  # type: ignore[assignment]
    host_memory: int = 16 * 10**11  # of 2 TB, as usual beside eight H100
    host_bandwidth: float = 300e9  # half of 16 channels of DDR5-4800, which both directions share
    beside: int = 0
    pod: int | None = None
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        require(ScheduleError, "device", one_of(Device, takes="a graphpp.devices.Device"), self.device)
        require(ScheduleError, "gpus", COUNT, self.gpus)
        require(ScheduleError, "per_machine", COUNT, self.per_machine)
        require(ScheduleError, "host_memory", BYTES, self.host_memory)
        require(ScheduleError, "host_bandwidth", PEAK, self.host_bandwidth)
        require(ScheduleError, "beside", INDEX, self.beside)
        require(ScheduleError, "pod", or_none(COUNT), self.pod)
        require(ScheduleError, "oversubscription", _NARROWER, self.oversubscription)
        if self.pod is None and self.oversubscription > 1:
            raise ScheduleError("oversubscription: give pod too, the devices between which the network has its full rate")
        if self.pod is not None and self.pod % self.per_machine:
            raise ScheduleError(f"pod: take a multiple of the {self.per_machine} devices of a machine, got {self.pod}")
        for name in ("inside", "between"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.device, name))
            require(ScheduleError, name, one_of(Link, takes="a graphpp.devices.Link, or None"), getattr(self, name))

    @classmethod
    @checked(ScheduleError, text=TEXT)
    def read(cls, text: str) -> Machines:
        """Machines from "<count>x<device>", such as "512xH100", with 8 devices in each machine, and the rest in the last one.

        Devices: H100 (also H100_SXM), H200, A100, B200, MI300X, CPU, with a power limit ("512xH100@500W"), another memory
        ("8xA100@40GB") or none of both; or a file "mine.json" for `Device.load`. `devices.read_machines` reads several groups
        too. Raises `GraphPPError` for other texts, counts and files.
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
        return cls(device, count)

    def __str__(self) -> str:
        return f"{self.gpus}x{self.device.name}"

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The slowest link that the group crosses."""
        return self.inside if self._spread(ranks, stride).machines == 1 else self.between

    @property
    def groups(self) -> tuple[Machines, ...]:
        """These machines alone, as `MixedMachines.groups`."""
        return (self,)

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
        return 1 + self.device.spread * sqrt(2 * log(self.gpus + self.beside))

    def contention(self, ranks: int, stride: int = 1) -> float:
        """Seconds that computations lose per second of a collective of the group beside them."""
        return self.link(ranks, stride).contention

    def all_reduce(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds until each rank has the sum over all: a reduce-scatter and an all-gather, as rings or trees of machines."""
        spread = self._spread(ranks, stride)
        tree = (spread.most - 1) * self.inside.latency + ceil(log2(spread.machines)) * self.between.latency
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
        least, most, machines = self._spread(ranks, stride)
        if not nbytes or ranks == 1:
            return 0.0
        to_machines, to_ranks = (_distinct(each, chosen) if chosen else 1.0 for each in (machines, ranks))
        across = self.between.seconds(nbytes * to_machines * (ranks - least) / ranks)
        inside = self.inside.seconds(nbytes * to_ranks * (most - 1) / (ranks if chosen is None else most))
        pods = self._pods(ranks, stride)
        leaving = max(each / pods.most * (ranks - each) for each in (pods.least, pods.most))  # of those on one full pod
        beyond = self.oversubscription * self.between.seconds(nbytes * to_machines * leaving / ranks)
        return max(inside, across, beyond) + self.link(ranks, stride).latency

    def send(self, nbytes: float, stride: int = 1) -> float:
        """Seconds of a message to the rank `stride` further, which all ranks send at once; 0 without bytes."""
        return self._message(nbytes, self._spread(2, stride).machines > 1, 1.0 if self._pods(2, stride).machines > 1 else 0.0)

    def message(self, nbytes: float, first: int, second: int, width: int) -> float:
        """Seconds of messages that `width` neighbouring ranks from `first` on send at once, each to one from `second` on."""
        low, distance = min(first, second), abs(first - second)
        across = low // self.per_machine != (low + distance + width - 1) // self.per_machine
        return self._message(nbytes, across, _leaving(self.pod, low % self.pod, distance, width) if self.pod else 0.0)

    def _message(self, nbytes: float, across: bool, leaving: float) -> float:
        """`leaving`: the share of a pod's devices that send to another pod."""
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        link = self.between if across else self.inside
        return link.latency + max(1.0, self.oversubscription * leaving) * link.seconds(nbytes) if nbytes else 0.0

    def _moved(self, nbytes: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather's bytes: the parts of one rank of each machine between machines, then all of them inside."""
        require(ScheduleError, "nbytes", _MESSAGE, nbytes)
        least, most, _ = self._spread(ranks, stride)
        pods = self._pods(ranks, stride)
        slower = max(1.0, self.oversubscription * least / pods.most) if pods.machines > 1 else 1.0
        across = slower * self.between.seconds(nbytes / least * (1 - least / ranks))
        return self.inside.seconds(nbytes * (most - 1) / most) + across

    def _hops(self, ranks: int, stride: int) -> float:
        """Seconds of the latencies of a ring."""
        machines = self._spread(ranks, stride).machines
        return (ranks - machines) * self.inside.latency + (machines - 1) * self.between.latency

    def _spread(self, ranks: int, stride: int) -> _Spread:
        """How the group lies on machines."""
        return self._on(self.per_machine, ranks, stride)

    def _pods(self, ranks: int, stride: int) -> _Spread:
        """How the group lies on pods, which stand for machines here."""
        return self._on(self.pod, ranks, stride) if self.pod else _Spread(ranks, ranks, 1)

    def _on(self, each: int, ranks: int, stride: int) -> _Spread:
        require(ScheduleError, "ranks", COUNT, ranks)
        require(ScheduleError, "stride", COUNT, stride)
        full = self.gpus <= each or self.gpus % each == 0
        return _widest_spread(each, ranks, stride, max(1, self.gpus // (ranks * stride)), full)
