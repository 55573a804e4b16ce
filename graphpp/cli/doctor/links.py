"""Measure the links between ranks under torchrun: latency and bandwidth of each pair of neighbours.

Contract
    in   the place of this rank, as `graphpp.compile` finds it; every rank calls `measure_links` with equal arguments
    out  on every rank, a `Link` for each pair (r, r + 1), and for (last, 0) where there are more than two ranks: an interleaved
         schedule sends over that pair too
    One pair at a time sends, so that pairs on one machine do not slow each other down. Messages are tensors on the rank's
    device, sent and received as a pipeline's messages are.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import RankPlace
from graphpp.streams import wait_for_device

_SMALL = 8  # bytes
_NAME = 64  # bytes of the name of a machine


@dataclass(frozen=True)
class Link:
    """One pair of ranks with their hosts: seconds until a message of 8 bytes has arrived, bytes a second of a large message."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency: float
    bandwidth: float


def pairs(ranks: int) -> list[tuple[int, int]]:
    """The pairs that are measured."""
    return [*((rank, rank + 1) for rank in range(ranks - 1)), *([(ranks - 1, 0)] if ranks > 2 else [])]


def measure_links(place: RankPlace, size: int, repeats: int) -> list[Link]:
    """Every link, on every rank. `size`: bytes of the large message; the medians of `repeats` messages count."""
    if size < _SMALL or repeats < 1:
        raise GraphPPError(f"--size, --repeats: take at least {_SMALL} bytes and one message, got {size} and {repeats}")
    own = (0.0, 0.0)
    for pair in pairs(place.ranks):
        dist.barrier(place.group)
        if place.rank in pair:
            found = _measured(place, pair, size, repeats)
            own = found if place.rank == pair[0] else own  # a rank is the first one of one pair
    numbers = [each.tolist() for each in _gathered(place, torch.tensor(own, dtype=torch.float64))]
    hosts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in _gathered(place, _host_name())]
    return [Link(pair, (hosts[pair[0]], hosts[pair[1]]), *numbers[pair[0]]) for pair in pairs(place.ranks)]


def _gathered(place: RankPlace, own: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in order; each has the shape and dtype of `own`."""
    sent = own.to(place.device)
    received = [torch.empty_like(sent) for _ in range(place.ranks)]
    dist.all_gather(received, sent, place.group)
    return received


def _host_name() -> torch.Tensor:
    """The name of this machine as uint8 [64], with zeros behind it."""
    return torch.tensor(list(socket.gethostname().encode()[:_NAME].ljust(_NAME, b"\0")), dtype=torch.uint8)


def _measured(place: RankPlace, pair: tuple[int, int], size: int, repeats: int) -> tuple[float, float]:
    """Latency and bandwidth, as the first rank of the pair sees them."""
    small = torch.zeros(_SMALL, dtype=torch.uint8, device=place.device)
    large = torch.zeros(size, dtype=torch.uint8, device=place.device)
    round_trip = _median(place, repeats, lambda: _there_and_back(place, pair, small, small))
    one_way = _median(place, repeats, lambda: _there_and_back(place, pair, large, small)) - round_trip / 2
    return round_trip / 2, size / max(one_way, 1e-9)


def _there_and_back(place: RankPlace, pair: tuple[int, int], sent: torch.Tensor, answer: torch.Tensor) -> None:
    """`sent` from the first rank of the pair to the second one, then `answer` back."""
    first = place.rank == pair[0]
    assert place.group is not None
    other = dist.get_global_rank(place.group, pair[1] if first else pair[0])
    for tensor, sends in ((sent, first), (answer, not first)):
        if sends:
            dist.send(tensor, other, place.group)
        else:
            dist.recv(tensor, other, place.group)


def _median(place: RankPlace, repeats: int, run: Callable[[], None]) -> float:
    """The median of the seconds of `repeats` runs, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        wait_for_device(place.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
