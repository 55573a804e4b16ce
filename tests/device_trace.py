"""A model of CUDA's streams on the CPU: a trace of what runs where, and a proof that no memory is touched too early.

Contract
--------
- `recording()` stands in for the streams and events of `torch.cuda` while this thread's operators run on CPU. Each one
  is a kernel on the current stream; operators that only allocate or make views run no kernel. An operation of a group of
  `tests.rendezvous` runs on the stream of its communicator, after what the current stream had when it was called, and
  `Work.wait` makes the current stream wait for it. `item` makes the host wait for the current stream. Operators of
  `on_host` are the caller's own on memory of the host.
- A collective holds its tensors until its wait, as the handles of torch do. A message holds none, which is stricter than torch.
- `Trace` keeps one vector clock for each stream and one for the host. A kernel starts after what its stream and the host knew
  when it was launched. A read must start after the last write of its memory, a write after the last write and all reads.
- Freed memory goes back to the stream that allocated it, in the order of the host's calls, as in torch's caching allocator.
  Whatever that stream allocates next may be the same memory: its first kernel must start after all uses of what was freed,
  but for those that `record_stream` named. A storage that shrinks to nothing (`resize_`) is freed, and allocated anew when it
  grows. Pinned memory is handed out again only when its copies are done.
- Memory is a storage; two views of one storage count as the same memory. Each race is a sentence in `Trace.races`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests import rendezvous

Clock = dict[str, int]
HOST, COMPUTE = "the host", "the compute stream"
IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")  # collectives that read what they write


@dataclass(frozen=True)
class Use:
    """A kernel that reads or writes memory: the `time`-th on its stream."""

    kernel: str
    stream: str
    time: int
    memory: str

    def __str__(self) -> str:
        return f"{self.kernel} (number {self.time} on {self.stream})"


@dataclass
class Memory:
    """One allocation, and its uses that a later one must wait for; of each stream the last."""

    name: str
    stream: str
    pinned: bool = False
    writer: Use | None = None
    readers: dict[str, Use] = field(default_factory=dict)
    used: dict[str, Use] = field(default_factory=dict)
    deferred: set[str] = field(default_factory=set)  # streams that `record_stream` named


class Trace:
    """What ran in which order, and the races in it. `kernels`: how many ran on each stream."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.memories: dict[Any, Memory] = {}
        self.races: list[str] = []
        self.freed = 0
        self._reusable: dict[str, dict[str, Use]] = {}  # for each stream the last uses, by stream, of memory freed to it

    @property
    def kernels(self) -> Clock:
        """How many kernels ran on each stream."""
        return {stream: clock[stream] for stream, clock in self.clocks.items() if stream in clock}

    def allocate(self, key: Any, name: str, stream: str, *, pinned: bool = False) -> None:
        before = {} if pinned else dict(self._reusable.get(stream, {}))
        self.memories[key] = Memory(name, stream, pinned, readers=before)

    def kernel(self, name: str, stream: str, reads: Iterable[Any] = (), writes: Iterable[Any] = ()) -> None:
        """Launch a kernel."""
        clock = self._clock(stream)
        self._join(clock, self.clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        written = set(writes)
        for key in {*reads, *written}:
            memory = self.memories[key]
            use = Use(name, stream, clock[stream], memory.name)
            before = [memory.writer, *(memory.readers.values() if key in written else ())]
            for other in before:
                if other is not None and not _reached(clock, other):
                    self._race(memory, "written" if key in written else "read", use, other)
                    self._join(clock, {other.stream: other.time})  # later kernels race as little as with this wait
            if key in written:
                memory.writer, memory.readers = use, {}
            else:
                memory.readers[stream] = use
            memory.used[stream] = use

    def snapshot(self, stream: str) -> Clock:
        """What an event that is recorded now on a stream waits for."""
        return dict(self._clock(stream))

    def wait(self, stream: str, event: Clock) -> None:
        """Let a stream, or the host, wait for an event."""
        self._join(self._clock(stream), event)

    def defer(self, key: Any, stream: str) -> None:
        """`record_stream`."""
        self.memories[key].deferred.add(stream)

    def free(self, key: Any) -> None:
        """Hand memory back to the stream that allocated it."""
        memory = self.memories.pop(key)
        self.freed += 1
        uses = () if memory.pinned else (use for stream, use in memory.used.items() if stream not in memory.deferred)
        pool = self._reusable.setdefault(memory.stream, {})
        for use in uses:
            pool[use.stream] = max(use, pool.get(use.stream, use), key=lambda each: each.time)

    def _race(self, memory: Memory, what: str, use: Use, other: Use) -> None:
        place = "" if other.memory == memory.name else f" in the place of {other.memory}, which was freed,"
        wait = f"{use.stream} must wait for {other.stream}"
        self.races.append(f"{memory.name} is {what}{place} by {use}, which does not wait for {other}: {wait}")

    def _clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})

    @staticmethod
    def _join(clock: Clock, other: Clock) -> None:
        for stream, time in other.items():
            clock[stream] = max(clock.get(stream, 0), time)


def _reached(clock: Clock, use: Use) -> bool:
    return clock.get(use.stream, 0) >= use.time


class Recorder(TorchDispatchMode):
    """Writes a trace of this thread's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.trace, self.current, self._streams, self._allocated = Trace(), COMPUTE, 0, 0
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self.sweep()
        pinned = bool(kwargs.pop("pin_memory", False))
        if func is torch.ops.aten.record_stream.default:
            self.trace.defer(self.key(args[0]), args[1].name)
            return None
        given = list(rendezvous.tensors_of([*args, *kwargs.values()]))
        keys = [self.key(tensor) for tensor in given]
        results = func(*args, **kwargs)
        made = [self.key(each, pinned=pinned) for each in rendezvous.tensors_of([results])]
        name, schema = func.overloadpacket.__name__, func._schema
        views = bool(schema.returns) and all(each.alias_info and not each.alias_info.is_write for each in schema.returns)
        if not views and "empty" not in name and "c10d" not in func.namespace:  # `communicate` notes a communicator's kernel
            written = [
                self.key(tensor)
                for argument, value in self._arguments(schema, args, kwargs)
                if argument.alias_info is not None and argument.alias_info.is_write
                for tensor in rendezvous.tensors_of([value])
            ]
            self.trace.kernel(name, self.current, keys, {*written, *(key for key in made if key not in keys)})
        if func is torch.ops.aten._local_scalar_dense.default:
            self.trace.wait(HOST, self.trace.snapshot(self.current))
        return results

    @staticmethod
    def _arguments(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        for index, argument in enumerate(schema.arguments):
            if index < len(args) and not argument.kwarg_only:
                yield argument, args[index]
            elif argument.name in kwargs:
                yield argument, kwargs[argument.name]

    def key(self, tensor: torch.Tensor, *, pinned: bool = False) -> int:
        """The key of a tensor's memory, which is noted when it is first seen."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = StorageWeakRef(storage)  # no other storage has this address while the reference is held
            self._allocated += 1
            name = f"memory {self._allocated} of {list(tensor.shape)} {tensor.dtype}"
            self.trace.allocate(key, name, self.current, pinned=pinned)
        return key

    def sweep(self) -> None:
        """Note memory that was freed since the last call of the device."""
        for key in [key for key, reference in self._known.items() if reference.expired()]:
            if key in self.trace.memories:
                self.trace.free(key)
            del self._known[key]

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Note that a storage's memory goes, or comes."""
        self.sweep()
        key = storage._cdata
        if key in self.trace.memories:
            self.trace.free(key)
        if nbytes:
            self._known.setdefault(key, StorageWeakRef(storage))
            self._allocated += 1
            self.trace.allocate(key, f"memory {self._allocated} of {nbytes} bytes", self.current)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.trace.memories[self.key(tensor)].pinned

    def on_host(self) -> AbstractContextManager[None]:
        """Operators that the host runs itself."""
        return self.on(FakeStream(self, HOST))

    def new_stream(self) -> FakeStream:
        self._streams += 1
        return FakeStream(self, f"side stream {self._streams}")

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def communicate(self, stream: str, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Clock:
        """Note an operation of a communicator; the event after it."""
        self.sweep()
        self.trace.wait(stream, self.trace.snapshot(self.current))
        self.trace.kernel(what, stream, [self.key(each) for each in reads], [self.key(each) for each in writes])
        return self.trace.snapshot(stream)

    def join(self, what: str, event: Clock) -> None:
        """Let the current stream wait for an operation of a communicator, `what`, and the event after it."""
        self.sweep()
        self.trace.wait(self.current, event)


@dataclass(frozen=True)
class FakeStream:
    """Stands in for `torch.cuda.Stream`."""

    recorder: Recorder
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.recorder.sweep()
        self.recorder.trace.wait(self.name, self.recorder.trace.snapshot(other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self.recorder.sweep()
        self.recorder.trace.wait(self.name, event.clock)

    def synchronize(self) -> None:
        self.recorder.sweep()
        self.recorder.trace.wait(HOST, self.recorder.trace.snapshot(self.name))


class FakeEvent:
    """Stands in for `torch.cuda.Event`; one that was not recorded waits for nothing, as on CUDA."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.clock = recorder, Clock()

    def record(self, stream: FakeStream) -> None:
        self.clock = self.recorder.trace.snapshot(stream.name)

    def synchronize(self) -> None:
        self.recorder.trace.wait(HOST, self.clock)

    def query(self) -> bool:
        self.synchronize()  # the host goes on when the device is past the event
        return True


@contextmanager
def recording() -> Iterator[Recorder]:
    """Write a trace of what this thread does; groups of `tests.rendezvous` write theirs into it."""
    recorder = Recorder()
    fakes: dict[str, Callable[..., Any]] = {
        "Stream": lambda device=None: recorder.new_stream(),
        "Event": lambda: FakeEvent(recorder),
        "current_stream": lambda device=None: FakeStream(recorder, recorder.current),
        "stream": recorder.on,
        "graph_pool_handle": lambda: (0, 0),
    }
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        recorder.resize(storage, nbytes)
        return resize(storage, nbytes)

    def is_pinned(tensor: torch.Tensor) -> bool:
        return recorder.is_pinned(tensor)

    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        for target, name, replacement in _communication(recorder):
            stack.enter_context(patch.object(target, name, replacement))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", is_pinned))
        stack.enter_context(recorder)
        yield recorder
        recorder.sweep()


def _communication(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    group, handle = rendezvous.RendezvousGroup, rendezvous.Handle
    collective, messages, wait = group.collective, group.messages, handle.wait
    # a handle's number -> the handle, so that no other has it, its event, and the tensors that it holds until its wait
    events: dict[int, tuple[Any, Clock, list[Any]]] = {}

    def noted(own: Any, work: Any, pair: tuple[int, ...], reads: Any, writes: Any, *, holds: bool) -> Any:
        stream, reads, writes = own._streams[pair].name, list(reads), list(writes)
        held = [*reads, *writes] if holds else []
        events[id(work)] = work, recorder.communicate(stream, work.what, reads, writes), held
        return work

    def on_collective(self: Any, name: str, *args: Any, opts: Any = None) -> Any:
        work = collective(self, name, *args, opts=opts)
        reads = rendezvous.tensors_of(args if name in IN_PLACE else args[1:])
        return noted(self, work, (), reads, rendezvous.tensors_of(args[:1]), holds=True)

    def on_messages(self: Any, given: Any, *, batched: bool) -> Any:
        pair = () if batched else tuple(sorted((self._own, given[0].peer)))
        work = messages(self, given, batched=batched)
        sent = [each.tensor for each in given if each.outgoing]
        return noted(self, work, pair, sent, [each.tensor for each in given if not each.outgoing], holds=False)

    def on_wait(self: Any, *args: Any) -> bool:
        ended = wait(self, *args)
        if id(self) in events:
            _, event, held = events[id(self)]
            recorder.join(self.what, event)
            held.clear()
        return ended

    return [(group, "collective", on_collective), (group, "messages", on_messages), (handle, "wait", on_wait)]
