"""The pipes and the shared memory through which two processes of one host exchange messages.

Contract: memory, pipes and handles have no name in a file system, so a killed process leaves nothing behind. Other processes
open them through `/proc`. Each is closed when its object dies. Mapped memory stays readable after its process has ended. A slot
keeps no file open once its reader has mapped it.

A slot's head has two numbers: how many of its messages have been read, and whether its owner waits for the next read. So a
receiver frees a slot without a system call, and wakes the sender only if the sender waits.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import struct
import weakref
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

SLOTS = 4  # maximal number of unread messages to one rank
_LEAST = 2**12  # bytes of a slot
_HEAD = 64  # bytes of a slot before the message
_READ, _WANTED = 0, 1  # indices of the numbers in a slot's head
_PACKED = struct.Struct("<hbbiiqqq")  # 36 bytes, below the size up to which a write to a pipe is atomic
_AT_ONCE = 64  # frames per read
_SERIALS = count(1)


class Frame(NamedTuple):
    """A line in a rank's pipe: a message of the rank `source`, with `size` bytes.

    `number`: of its slot; `handle`, `serial`, `capacity`: of the slot's memory; `order`: the message's number in the slot.
    """

    source: int
    channel: int
    number: int = 0
    handle: int = 0
    serial: int = 0
    order: int = 0
    capacity: int = 0
    size: int = 0


class Inbox:
    """The pipe into which other ranks write frames. Its own open writing end prevents an end of file."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe2(os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self.reads, select.POLLIN)
        for handle in (self.reads, self.writes):
            weakref.finalize(self, os.close, handle)

    def ready(self) -> bool:
        return bool(self._poller.poll(0))

    def read(self) -> list[Frame]:
        """The frames that have arrived; blocks until there is one."""
        return [Frame(*each) for each in _PACKED.iter_unpack(os.read(self.reads, _AT_ONCE * _PACKED.size))]


class Secret:
    """A random number in this process's memory: a process that can read it is on this host and has the right process id."""

    def __init__(self) -> None:
        self.word, self.handle = secrets.randbits(62), os.memfd_create("graphpp", os.MFD_CLOEXEC)
        os.write(self.handle, self.word.to_bytes(8, "little"))
        weakref.finalize(self, os.close, self.handle)

    @staticmethod
    def read(process: int, handle: int) -> int:
        """The number in another process's handle. Raises `OSError`."""
        with open(f"/proc/{process}/fd/{handle}", "rb") as memory:
            return int.from_bytes(memory.read(8), "little")


class Mapped:
    """A slot's memory, mapped into this process; keeps no file open. `address`: of the message."""

    def __init__(self, process: int, handle: int, capacity: int, serial: int) -> None:
        """Map the memory of a handle of a process. Raises `RuntimeError` if the handle is closed."""
        path = f"/proc/{process}/fd/{handle}"
        self.serial, self._memory = serial, torch.UntypedStorage.from_file(path, True, capacity)  # True: shared
        self.head = (ctypes.c_uint64 * 2).from_address(self._memory.data_ptr())
        self.address = self._memory.data_ptr() + _HEAD

    def read(self, order: int) -> bool:
        """Note that message number `order` has been read; returns whether the slot's owner waits for that."""
        self.head[_READ] = order
        if not self.head[_WANTED]:
            return False
        self.head[_WANTED] = 0
        return True


class Slot:
    """Memory of this rank for one message. `count`: messages so far. `handle`: open until its reader has mapped the memory."""

    def __init__(self, number: int, size: int) -> None:
        """`size`: bytes of the first message."""
        self.number, self.serial, self.count = number, next(_SERIALS), 0
        self.handle = os.memfd_create("graphpp", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.handle)
        self.capacity = max(_LEAST, 1 << (size + _HEAD - 1).bit_length())
        os.ftruncate(self.handle, self.capacity)
        self.memory = Mapped(os.getpid(), self.handle, self.capacity, self.serial)

    @property
    def free(self) -> bool:
        return self.memory.head[_READ] == self.count

    @property
    def fresh(self) -> bool:
        """Whether no message has been read, so that the reader may not have mapped the memory."""
        return not self.memory.head[_READ]

    def want(self) -> None:
        self.memory.head[_WANTED] = 1


@dataclass
class Outbox:

    slots: list[Slot] = field(default_factory=list)

    def is_settled(self) -> bool:
        """Whether the other rank can read every message even if this process ends."""
        return not any(slot.fresh for slot in self.slots)

    def close_handles(self) -> None:
        for slot in self.slots:
            if not slot.fresh:
                slot.close()

    def has_room(self) -> bool:
        return len(self.slots) < SLOTS or any(slot.free for slot in self.slots)

    def take(self, size: int) -> Slot | None:
        """A free slot for `size` bytes, if possible without new memory; None if no slot is free."""
        free = [slot for slot in self.slots if slot.free]
        for slot in free:
            if slot.capacity >= size + _HEAD:
                return slot
        if len(self.slots) < SLOTS:
            self.slots.append(Slot(len(self.slots), size))
            return self.slots[-1]
        if not free:
            return None
        slot = self.slots[free[0].number] = Slot(free[0].number, size)
        return slot

    def want(self) -> None:
        for slot in self.slots:
            slot.want()


class Peer:
    """Another rank of the group: its process, its pipe, this rank's slots for it, and its slots, mapped into this process."""

    def __init__(self, rank: int, process: int, pipe: int, inbox: Inbox) -> None:
        """`pipe`: the handle of the peer's writing end, in its process; `inbox`: this rank's own. Raises `OSError`."""
        self.rank, self.outbox = rank, Outbox()
        self._process, self._inbox, self._mapped = process, inbox.reads, dict[int, Mapped]()
        self._pipe = os.open(f"/proc/{process}/fd/{pipe}", os.O_WRONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._pipe)
        self._ended = os.pidfd_open(process)  # readable when the process has ended
        weakref.finalize(self, os.close, self._ended)
        self._poller = select.poll()
        self._poller.register(self._inbox, select.POLLIN)
        self._poller.register(self._ended, select.POLLIN)

    def wait(self, seconds: float) -> tuple[bool, bool]:
        """Wait for a frame of any rank or for this peer's end; returns whether (a frame has arrived, the peer has ended)."""
        ready = {handle for handle, _ in self._poller.poll(1e3 * seconds)}
        return self._inbox in ready, self._ended in ready

    def write(self, frame: Frame) -> None:
        """Write into the peer's pipe. Raises `BrokenPipeError` if the peer has closed it."""
        os.write(self._pipe, _PACKED.pack(*frame))

    def mapped(self, frame: Frame) -> Mapped:
        """The slot of a frame of the peer, mapped here. Raises `RuntimeError` if it cannot be mapped."""
        known = self._mapped.get(frame.number)
        if known is None or known.serial != frame.serial:
            known = self._mapped[frame.number] = Mapped(self._process, frame.handle, frame.capacity, frame.serial)
        return known
