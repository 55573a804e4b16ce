"""A backend of torch.distributed on the CPU that orders and blocks messages as NCCL does.

Contract
--------
- A communicator has one stream on each rank, a thread: it runs the operations one after another, in the order of their calls. A
  call returns at once; `Work.wait` waits for the stream.
- An operation ends when all its ranks have come to it. Nothing is buffered: a send ends when its receive stands at the head of
  the other rank's stream. That is stricter than NCCL, which buffers small messages: two ranks that both send 16 bytes first
  go on, and both wait for ever with 128 MiB (NCCL 2.30.7, two ranks on one H100, 2026-11-28).
- Collectives and batches of a group run on the group's communicator. A batch is one operation, whose messages go on
  independently of each other. A single message runs on a communicator of its two ranks, or, where the group was made eagerly
  (`init_process_group(device_id=...)`: `Rules.EAGER`), on the group's.
- `Rules.SERIAL` is stricter than NCCL: all operations of a rank run on one stream, as where the kernels of one communicator
  fill the GPU and those of another wait for them.
- `Rules.BLOCKING` is stricter still: each call returns when the operation has ended. So it is where the host waits for the
  whole device between any two calls, as it does when CUDA allocates memory or a graph is recorded.
- The first operation on a communicator makes it, which holds the calling thread until all ranks of the communicator call one.
- Ranks whose operations on one communicator differ in kind, size or dtype raise `OrderError`. Ranks that wait for each other
  in a circle raise after some time, and name the operation at the head of each stream.
- Each operation starts late, by a random time, but under `Rules.BLOCKING`: memory that is written or freed before `Work.wait`
  has returned changes numbers.

The rules are those of torch.distributed's documentation of ProcessGroupNCCL and of NCCL's on streams and groups. Seen there
too: one handle for a batch; ranks of which one sends in a batch and the other receives singly wait for ever, where the group
was made lazily. Tensors travel over gloo.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import torch
import torch.distributed as dist

BACKEND = "rendezvous"
LATE = 0.002  # seconds; the longest time by which an operation starts late
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "barrier", "reduce", "reduce_scatter",
    "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    "gather", "scatter",
)  # fmt: skip
COALESCED_GATHERS = ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")
UNEVEN = ("alltoall", "alltoall_base", "all_to_all_single")


class Rules(Enum):
    """Which operations of a rank wait for each other."""

    LAZY = "those of one communicator; a single message has one for its two ranks"
    EAGER = "those of one group"
    SERIAL = "all"
    BLOCKING = "all, and the host waits for each"


class OrderError(RuntimeError):
    """Two ranks run different operations at the same place of one communicator."""


class Message(NamedTuple):
    """A send or receive; `peer`: the other rank in the group."""

    outgoing: bool
    tensor: torch.Tensor
    peer: int

    def __str__(self) -> str:
        return f"{'send to' if self.outgoing else 'receive from'} {self.peer} {list(self.tensor.shape)}"


class Handle(dist.Work):
    """The handle of an operation."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait for the operation's end. Raises its error."""
        self.ended.wait()
        if self.error is not None:
            raise OrderError(str(self.error)) from self.error
        return True


@dataclass
class Stream:
    """The stream of one communicator on this rank. `blocking`: a call returns when its operation has ended."""

    name: str
    blocking: bool = False
    calls: queue.SimpleQueue[tuple[Handle, Callable[[], None]] | None] = field(default_factory=queue.SimpleQueue)
    head: str = "nothing"
    thread: threading.Thread | None = None

    def put(self, what: str, run: Callable[[], None]) -> dist.Work:
        """Add an operation to the stream's end."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, daemon=True, name=self.name)
            self.thread.start()
        handle = Handle(what)
        self.calls.put((handle, run))
        if self.blocking:
            handle.wait()
        return handle

    def end(self) -> None:
        self.calls.put(None)

    def _serve(self) -> None:
        late = random.Random(self.name)
        while (call := self.calls.get()) is not None:
            handle, run = call
            self.head = handle.what
            if not self.blocking:  # else the host has no time to write memory meanwhile
                time.sleep(late.uniform(0, LATE))
            try:
                run()
            except BaseException as error:
                handle.error = error
            handle.ended.set()
            self.head = "nothing"


class RendezvousGroup(dist.ProcessGroup):
    """A process group whose operations keep the rules at the head of this file."""

    groups: list[RendezvousGroup] = []  # noqa: RUF012 - all groups of this process
    rules = Rules.LAZY
    patience = timedelta(seconds=60)  # after which a rank that waits raises
    only = Stream("the stream of all communicators")

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
        super().__init__(rank, ranks)
        self._ranks, self._own, self._store = ranks, rank, store
        wire = dist.PrefixStore("wire", store)
        gloo = dist.ProcessGroup.BackendType.GLOO
        self._wire = dist.ProcessGroup(wire, rank, ranks)
        self._wire._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(wire, rank, ranks, self.patience))
        self._wire._set_default_backend(gloo)
        self._streams: dict[tuple[int, ...], Stream] = {}
        self.log: list[str] = []  # every operation, in the order of the calls
        self.groups.append(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    # ------------------------------------------------------------------------------------------------ calls

    def collective(self, name: str, *args: Any, opts: Any = None) -> dist.Work:
        """Start a collective of gloo of this name."""
        args += () if opts is None else (opts,)
        everywhere = args[name == "gather"]  # the first rank of a scatter or gather has more tensors
        uneven = name in UNEVEN  # gloo compares the sizes of each pair of ranks
        facts = [(each.dtype, None if uneven else each.numel()) for each in tensors_of(everywhere)]
        what = self._logged(f"{name} {facts}")
        run = partial(self._on_wire, name, args)
        return self._stream().put(what, partial(self._collective, what, run))

    def _on_wire(self, name: str, args: Sequence[Any]) -> list[dist.Work]:
        """Start the collective over gloo, whose coalesced gathers corrupt memory (`graphpp/_torch/gloo_gathers.py`)."""
        if name in COALESCED_GATHERS:
            return [self._wire._allgather_base(whole, own) for whole, own in zip(*args[:2], strict=True)]
        return [getattr(self._wire, name)(*args)]

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        return self.messages([Message(True, tensors[0], rank)], batched=self.rules is not Rules.LAZY)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        return self.messages([Message(False, tensors[0], rank)], batched=self.rules is not Rules.LAZY)

    def messages(self, messages: Sequence[Message], *, batched: bool) -> dist.Work:
        """Start messages as one operation. `batched`: on the group's communicator."""
        pair = () if batched else tuple(sorted((self._own, messages[0].peer)))
        what = self._logged(" + ".join(map(str, messages)))
        return self._stream(pair).put(what, partial(self._exchange, messages, 10 + 10 * batched))

    def _logged(self, what: str) -> str:
        self.log.append(what)
        return what

    def _stream(self, pair: tuple[int, ...] = ()) -> Stream:
        """The stream of the communicator of a pair of ranks, or of the whole group; all its ranks make a new one together."""
        if pair not in self._streams:
            name = f"the communicator of {pair or 'all'}"
            self._store.set(f"{name}, {self._own}", "made")
            try:
                self._store.wait([f"{name}, {member}" for member in pair or range(self._ranks)], self.patience)
            except RuntimeError as error:
                raise OrderError(f"rank {self._own} makes {name}, another rank does not.\n{heads()}") from error
            own = Stream(f"rank {self._own} of {self._ranks}, {name} in group {self.group_name}")
            self._streams[pair] = self.only if self.rules in (Rules.SERIAL, Rules.BLOCKING) else own
        return self._streams[pair]

    def end(self) -> None:
        for stream in self._streams.values():
            stream.end()

    # ------------------------------------------------------------------------------------ in a stream's thread

    def _collective(self, what: str, run: Callable[[], list[dist.Work]]) -> None:
        mine = torch.tensor([crc32(what.encode())])
        theirs = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._waited(what, [self._wire.allgather([theirs], [mine])])
        if any(not torch.equal(mine, other) for other in theirs):
            raise OrderError(f"rank {self._own} runs {what}, others do not")
        self._waited(what, run())

    def _exchange(self, messages: Sequence[Message], tag: int) -> None:
        works, checks = [], []
        for message in messages:
            facts = torch.tensor([message.tensor.numel(), crc32(str(message.tensor.dtype).encode())])
            ready, data = torch.zeros(1), message.tensor.detach()
            if message.outgoing:
                works += [self._wire.send([facts], message.peer, tag), self._wire.send([data], message.peer, tag + 1)]
                works += [self._wire.recv([ready], message.peer, tag + 2)]
            else:
                theirs = torch.empty_like(facts)
                checks.append((message, facts, theirs))
                works += [self._wire.recv([theirs], message.peer, tag), self._wire.recv([data], message.peer, tag + 1)]
                works += [self._wire.send([ready], message.peer, tag + 2)]
        self._waited(" + ".join(map(str, messages)), works)
        for message, facts, theirs in checks:
            if not torch.equal(facts, theirs):
                raise OrderError(f"rank {self._own} runs {message}, but the other rank sends {theirs.tolist()}")

    def _waited(self, what: str, works: Sequence[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise OrderError(f"rank {self._own} waits in {what}: {error}.\n{heads()}") from error


def _collective_of(name: str) -> Callable[..., dist.Work]:
    def call(group: RendezvousGroup, *args: Any, opts: Any = None) -> dist.Work:
        return group.collective(name, *args, opts=opts)  # looked up when called: a test may stand in for `collective`

    return call


for _name in (*COLLECTIVES, *UNEVEN):
    setattr(RendezvousGroup, _name, _collective_of(_name))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def heads() -> str:
    """The operation at the head of each stream of this process."""
    streams = [stream for group in RendezvousGroup.groups for stream in group._streams.values()]
    return "\n".join(f"  {stream.name}: {stream.head}" for stream in streams)


def _batched(operations: list[dist.P2POp]) -> list[dist.Work]:
    """A batch as NCCL runs it: one operation, with one handle."""
    group = operations[0].group or dist.group.WORLD
    assert isinstance(group, RendezvousGroup)
    messages = [Message(each.op is dist.isend, each.tensor, each.group_peer) for each in operations]
    return [group.messages(messages, batched=True)]


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, RendezvousGroup, devices=["cpu"])


@contextmanager
def nccl_rules(rank: int, ranks: int, folder: Path, rules: Rules, seconds: float = 60.0) -> Iterator[list[RendezvousGroup]]:
    """The process's default group and every group made meanwhile keep NCCL's rules; afterwards there is none. Yields them.

    `folder`: one that all ranks see, in which no other context was. `seconds`: after which a rank that waits raises.
    """
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves cuts those off that are still being connected
        dist.destroy_process_group()
    RendezvousGroup.groups.clear()
    RendezvousGroup.rules, RendezvousGroup.patience = rules, timedelta(seconds=seconds)
    RendezvousGroup.only = Stream(f"rank {rank}", blocking=rules is Rules.BLOCKING)
    dist.init_process_group(BACKEND, init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    try:
        with patch.object(dist, "batch_isend_irecv", _batched):
            yield RendezvousGroup.groups
        dist.barrier()
    finally:
        for group in RendezvousGroup.groups:
            group.end()
        RendezvousGroup.groups.clear()
        dist.destroy_process_group()
