"""Unlike machines in one job: groups, of which each has one kind of device.

The ranks of the pipeline lie on the groups in their order, each pipeline rank within one group. So every collective passes the
links of one group, and only messages between stages pass from one group to another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from graphpp.arguments import BYTES, Accepted, require
from graphpp.devices.device import Device, Link
from graphpp.devices.machines import Machines
from graphpp.errors import ScheduleError

USABLE = 0.9  # of a device's memory; workspaces and the allocator take the rest
_MOST = 3  # groups: a search for each order of some of them
_GROUPS = Accepted(
    f"a tuple of 1 to {_MOST} graphpp.devices.Machines",
    lambda value: isinstance(value, tuple) and 0 < len(value) <= _MOST and all(isinstance(each, Machines) for each in value),
)
_CAPS = Accepted("numbers of bytes", lambda value: isinstance(value, tuple) and all(map(BYTES.accepts, value)))


@dataclass(frozen=True)
class MixedMachines:
    """Groups of machines with unlike devices, in the order of the pipeline's ranks: the first ranks are on the first group.

    `caps`: bytes that a device of each group may hold (): 90 % of its memory. A group's links are those of its `Machines`; a
    message from one group to another takes the slower of both networks. Raises `ScheduleError` for other values.
    """

    groups: tuple[Machines, ...]
    caps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(ScheduleError, "groups", _GROUPS, self.groups)
        require(ScheduleError, "caps", _CAPS, self.caps)
        kinds = sorted({each.device.torch_type for each in self.groups})
        if len(kinds) > 1:
            raise ScheduleError(f"groups: one job has devices of one type of torch, got {' and '.join(kinds)}: plan each alone")
        groups = tuple(replace(each, beside=self.gpus - each.gpus) for each in self.groups)
        caps = self.caps or tuple(round(each.device.memory * USABLE) for each in groups)
        if len(caps) != len(groups):
            raise ScheduleError(f"caps: take one number of bytes for each of {len(groups)} groups, got {len(caps)}")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "caps", caps)

    @classmethod
    def of(cls, parts: Sequence[Machines]) -> Machines | MixedMachines:
        """The job of these machines. Groups that are alike and fill their machines are one group. Raises `ScheduleError` for
        too many groups."""
        found = list[Machines]()
        for each in parts:
            at = next((at for at, one in enumerate(found) if _fill_up(one, each)), None)
            if at is None:
                found.append(each)
            else:
                found[at] = replace(each, gpus=found[at].gpus + each.gpus)
        if len(found) > _MOST:
            raise ScheduleError(f"machines: take at most {_MOST} groups, got {' + '.join(map(str, found))}")
        return found[0] if len(found) == 1 else cls(tuple(found))

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))

    @property
    def gpus(self) -> int:
        return sum(each.gpus for each in self.groups)

    @property
    def per_machine(self) -> int:
        """The devices of a machine in the group where it has fewest."""
        return min(each.per_machine for each in self.groups)

    @property
    def device(self) -> Device:
        """The device of the first pipeline rank."""
        return self.groups[0].device

    @property
    def host(self) -> Link | None:
        """The slowest link of a device to its host's memory; None: a group has none, so nothing is offloaded."""
        links = [each.host for each in self.groups]
        return min((each for each in links if each), key=lambda each: each.bandwidth * each.share) if all(links) else None

    @property
    def host_memory(self) -> int:
        return min(each.host_memory for each in self.groups)

    def group_of(self, gpu: int) -> int:
        """The index of the group that has the device of this number."""
        ends = (sum(each.gpus for each in self.groups[: at + 1]) for at in range(len(self.groups)))
        return next(at for at, end in enumerate(ends) if gpu < end)

    def message(self, nbytes: float, first: int, second: int, width: int) -> float:
        """As `Machines.message`; between two groups the slower of both networks counts, beyond their pods."""
        one, other = self.group_of(first), self.group_of(second)
        if one != other:
            ends = (self.groups[one], self.groups[other])
            return max(each.message(nbytes, 0, each.pod or each.per_machine, width) for each in ends)
        start = sum(each.gpus for each in self.groups[:one])
        return self.groups[one].message(nbytes, first - start, second - start, width)

    @property
    def as_one(self) -> MixedMachines | None:
        """One group whose devices all have the least memory, if the groups differ in memory alone; else None."""
        least = self.groups[min(range(len(self.groups)), key=lambda at: self.caps[at])]
        for each in self.groups:
            device = replace(each.device, name=least.device.name, memory=least.device.memory)
            if replace(each, device=device, gpus=least.gpus, beside=least.beside) != least:
                return None
        partly = sum(each.gpus % _whole(each) > 0 for each in self.groups)
        return MixedMachines((replace(least, gpus=self.gpus),), (min(self.caps),)) if partly < 2 else None

    def orders(self, fewest: int = 1) -> Iterator[MixedMachines]:
        """All groups `as_one`, each order of all groups, and then of fewer ones, where the others stay idle; none twice."""
        found = [self.as_one] if len(self.groups) > 1 else []
        for count in range(len(self.groups), fewest - 1, -1):
            for chosen in permutations(range(len(self.groups)), count):
                found.append(MixedMachines(tuple(self.groups[at] for at in chosen), tuple(self.caps[at] for at in chosen)))
        return iter(dict.fromkeys(filter(None, found)))


def read_machines(text: str, group: Callable[[str], Machines] = Machines.read) -> Machines | MixedMachines:
    """Machines from "512xH100", or of several groups from "8xH100 + 16xA100". `group` reads one group."""
    return MixedMachines.of([group(each) for each in re.split(r"\s*\+\s*(?=[0-9]+\s*[xX])|\s\+\s", text)])


def _fill_up(one: Machines, other: Machines) -> bool:
    return replace(one, gpus=other.gpus) == other and 0 in (one.gpus % _whole(one), other.gpus % _whole(one))


def _whole(machines: Machines) -> int:
    """The devices of a full pod, or without pods of a full machine."""
    return machines.pod or machines.per_machine
