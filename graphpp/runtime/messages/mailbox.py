"""Point-to-point messages: tensors to and from the ranks of the neighbouring stages.

- Shape, strides and dtype of each tensor are known before the step (`wire_layout.py`), so no message carries them. Posting a
  receive allocates its buffer.
- Both ranks of a pair post their messages in the order of the action table, one total order of (send, receive) pairs, so two
  neighbours that send to each other cannot deadlock.
- A batch (P2P) is posted in one call. NCCL returns one handle for a whole batch, other backends one for each message. On NCCL a
  batch uses another communicator than a single message, so with `batched=True` a single message is posted as a batch too.
- At most `DEPTH` messages to one rank are in flight. A further send first waits for the oldest, which is earlier in the total
  order, so this wait cannot deadlock. A sent tensor is released once its send is complete: at once where the transport copies
  sent tensors.
- On CUDA messages run on NCCL's streams: a posted send waits for the current stream's work so far, and `wait` makes the current
  stream wait, never the host.
- A lost connection raises `PeerLost`, which names the peer. While the host waits long, another thread logs the message's name.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist

from graphpp.log import logger
from graphpp.parallel import late_rank
from graphpp.parallel.groups import PeerLost, receives_overtake
from graphpp.parallel.late_rank import SlowWaits
from graphpp.parallel.transport import Transport, Work, transport_of
from graphpp.runtime.messages.wire_layout import ReceiveBuffer, WireLayout
from graphpp.schedules.table.costs import DEPTH, MessageFlow

_LOG = logger(__name__)


@dataclass(slots=True)
class Message:
    """A message to or from `peer`, a rank within the group. `works`: handles to wait for, once posted.

    `tensors`: sent tensors, or tensors that stay on this rank; `buffers`: where tensors from another rank arrive. `name`: the
    action's, such as 2RECV_F0.
    """

    peer: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    buffers: Sequence[ReceiveBuffer] = ()
    outgoing: bool = False
    works: Sequence[Work] = ()
    name: str = ""

    @property
    def elements(self) -> list[torch.Tensor]:
        """The memory that a send reads, or a receive writes."""
        return self.tensors if self.outgoing else [buffer.elements for buffer in self.buffers]

    def done(self) -> bool:
        """Whether all tensors are known to be sent or received; does not wait."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they have arrived; on CUDA, the current stream waits for them. Raises `PeerLost`."""
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(self.peer, str(error)) from error
        return [buffer.value() for buffer in self.buffers] if self.buffers else self.tensors


def message_flow(group: dist.ProcessGroup | None, device: torch.device) -> MessageFlow:
    """How early receives of a pipeline are posted, and how long messages take memory.

    `group`: None where one process plans a table for several ranks, which then count as ranks of one host.
    """
    copies = device.type == "cpu" and (group is None or transport_of(group, device).copies)
    return MessageFlow(ahead=DEPTH if receives_overtake(group, device) else 0, kept=0 if copies else DEPTH)


class Mailbox:
    """Packs, posts and awaits the messages of one pipeline over one process group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        batched: bool = False,
        slow_after: float | None = None,
    ) -> None:
        """`slow_after`: the seconds of a wait after which a warning names the message; None: never."""
        self.device, self._group, self.transport = device, group, transport_of(group, device)
        self._together = batched and not self.transport.copies
        self._outgoing: dict[int, deque[Message]] = defaultdict(deque)
        self.waited = 0.0  # seconds that this process waited for messages
        self.on_wait: Callable[[], None] | None = None  # called before and after each wait, while a step is recorded
        self._waiting: tuple[Message, float] | None = None
        self._slow = None if slow_after is None else SlowWaits(slow_after)
        if group is not None and self._slow is not None:
            late_rank.when_idle(self)

    def outgoing(self, values: Sequence[torch.Tensor], layouts: Sequence[WireLayout], peer: int, name: str = "") -> Message:
        """A packed message for `peer`, not posted yet."""
        packed = [layout.pack(value) for value, layout in zip(values, layouts, strict=True)]
        return Message(peer, packed, outgoing=True, name=name)

    def incoming(self, layouts: Sequence[WireLayout], peer: int, name: str = "") -> Message:
        """A message from `peer` with newly allocated receive buffers, not posted yet."""
        return Message(peer, buffers=[layout.buffer(self.device) for layout in layouts], name=name)

    def start(self, messages: Sequence[Message]) -> None:
        """Post messages, with `batched` in one call. Waits only to keep at most `DEPTH` messages to a rank in flight."""
        sends = [] if self.transport.copies else [message for message in messages if message.outgoing]
        for peer, count in Counter([message.peer for message in sends]).items() if sends else ():
            self._make_room(peer, count)
        if self._together:
            post_together(messages, self._group)
        else:
            for message in messages:
                message.works = post(message, self.transport)
        for message in sends:
            self._outgoing[message.peer].append(message)

    def _make_room(self, peer: int, count: int) -> None:
        """Wait for the oldest sends to `peer` until `count` more make at most `DEPTH`."""
        outgoing = self._outgoing[peer]
        while outgoing and (outgoing[0].done() or len(outgoing) + count > DEPTH):
            self.wait(outgoing.popleft())

    def wait(self, message: Message) -> list[torch.Tensor]:
        """The tensors of a message, once they have arrived; adds the time to `waited`."""
        on_wait = self.on_wait if message.works else None
        if on_wait is not None:
            on_wait()
        began = time.perf_counter()
        self._waiting = message, began
        try:
            tensors = message.wait()
        finally:
            self._waiting = None
        self.waited += time.perf_counter() - began
        if on_wait is not None:
            on_wait()
        return tensors

    def look(self) -> None:
        """Log a warning if the host waits long for a message. Another thread calls this while no call begins or ends."""
        waiting, slow, group = self._waiting, self._slow, self._group
        if waiting is None or slow is None or group is None or not slow.says(seconds := time.perf_counter() - waiting[1]):
            return
        here, peer = dist.get_rank(), dist.get_global_rank(group, waiting[0].peer)
        _LOG.warning("rank %d has waited %.0f s in %s for rank %d", here, seconds, waiting[0].name, peer)

    def flush(self) -> None:
        for outgoing in self._outgoing.values():
            while outgoing:
                self.wait(outgoing.popleft())
        self.transport.settle()

    def drop(self) -> None:
        self._outgoing.clear()
        self.transport.drop()


def post(message: Message, transport: Transport) -> Sequence[Work]:
    """Post a message and return its handles. Raises `PeerLost`."""
    start = transport.send if message.outgoing else transport.receive
    try:
        return start(message.elements, message.peer)
    except RuntimeError as error:
        raise PeerLost(message.peer, str(error)) from error


def post_together(messages: Sequence[Message], group: dist.ProcessGroup | None) -> None:
    """Post all messages in one call and set each one's handles. Raises `PeerLost`."""
    each = [[_operation(message, value, group) for value in message.elements] for message in messages]
    ops = [op for own in each for op in own]
    peers = {message.peer for message, own in zip(messages, each, strict=True) if own}
    try:
        works = dist.batch_isend_irecv(ops) if ops else []
    except RuntimeError as error:
        raise PeerLost(peers.pop() if len(peers) == 1 else None, str(error)) from error
    handles = iter(works)
    for message, own in zip(messages, each, strict=True):
        message.works = list(islice(handles, len(own))) if len(works) == len(ops) else list(works)


def _operation(message: Message, value: torch.Tensor, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.isend if message.outgoing else dist.irecv, value, group=group, group_peer=message.peer)
