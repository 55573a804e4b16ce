"""The streams, events and pinned memory of a GPU, and every rule of CUDA about them that graphpp relies on.

- Kernels of one stream run in launch order; only waits order two streams. The current stream computes.
- Freed memory returns at once to the stream on which it was allocated: a tensor that another stream uses is kept until the
  current stream waits for that use (`SideStream.join`). So `Tensor.record_stream` is not used.
- torch reuses its pinned memory only after the copies from and to it. The owner may write to it at any time:
  `InputCopies.finish` makes the host wait until the device has read it.
- torch hands out 32 streams of a device in turn, so a side stream may be a communicator's. Its work then waits for messages
  posted before, which end even if this rank waits (`schedules/check/deadlock.py`). After a failure a message may never come, so
  there the host waits for a limited time (`InputCopies.finish_by`).
- In a step the host waits for the device only in `InputCopies`, and where a program reads a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

_SECONDS_AFTER_ERROR = 5  # to wait for copies of inputs; they take milliseconds unless the device waits for a lost rank
_STILL_READ = (
    "graphpp: the device may still read the pinned inputs of the step, since it waits for another rank. Do not write to them."
)


class SideStream:
    """A second stream. `stream`: the CUDA stream, for a capture."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.stream = device, torch.cuda.Stream(device)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Kernels and copies inside the context run on this stream, after the current stream's work so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def in_place_of_current(self) -> Iterator[None]:
        """As `forked`; later work of the current stream waits for the context's, also after an error."""
        try:
            with self.forked():
                yield
        finally:
            self.join()

    def mark(self) -> torch.cuda.Event:
        """An event after the stream's work so far."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def join(self, event: torch.cuda.Event | None = None) -> None:
        """Let the current stream wait for an event of this stream; None: for its work so far."""
        current = torch.cuda.current_stream(self._device)
        if event is None:
            current.wait_stream(self.stream)
        else:
            current.wait_event(event)


class InputCopies:
    """Copies the arguments of a step to a device; the caller may write to them once the step has returned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: torch.cuda.Event | None = None  # after the last copy from pinned memory

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """The value on the device; the host does not wait for a copy from pinned memory."""
        if value.device == self._device:
            return value
        copy = value.to(self._device, non_blocking=True)
        if value.is_pinned():
            self._read = self._read or torch.cuda.Event()
            self._read.record(torch.cuda.current_stream(self._device))
        return copy

    def finish(self) -> None:
        """Wait until the device has read all values from pinned memory; copies from other memory are complete already."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None

    def finish_by(self, deadline: float) -> bool:
        """Wait as `finish`, but only until `deadline` (`time.monotonic`); whether the device has read all values."""
        read, self._read = self._read, None
        while read is not None and not _is_over(read):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


def finish_copies_after(error: BaseException, copies: Iterable[InputCopies]) -> None:
    """Wait until the device has read the inputs; after the time limit (another rank failed too) add a note instead."""
    deadline = time.monotonic() + _SECONDS_AFTER_ERROR
    if not all([each.finish_by(deadline) for each in copies]):
        error.add_note(_STILL_READ)


def _is_over(event: torch.cuda.Event) -> bool:
    """Whether the device has passed an event; after a device error, which ends all its work, True."""
    try:
        return bool(event.query())
    except RuntimeError:
        return True


def end_marker(device: torch.device) -> Callable[[], Callable[[], bool]] | None:
    """A function that marks the current stream's present end, and returns whether the device has passed it; None on a CPU."""
    if device.type != "cuda":
        return None
    return lambda: partial(_is_over, torch.cuda.current_stream(device).record_event())


def from_host(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host value on the device; pinned, so that the host does not wait as for pageable memory."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


def to_host(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a device value in the host's memory, pinned on CUDA; the copy may be in flight on the current stream."""
    on_gpu = device.type == "cuda"
    return host_memory_for(value, pinned=on_gpu).copy_(value, non_blocking=on_gpu)


def host_memory_for(value: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)


def timing_event(device: torch.device) -> torch.cuda.Event:
    """An event with a time, after the current stream's work so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """A context with `device` as CUDA's current device; the caller may have set another one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
