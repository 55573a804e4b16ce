"""Every value that crosses a boundary arrives bit for bit, with the strides of the captured graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphpp.parallel.groups import PeerLost
from graphpp.runtime.messages import mailbox as mailbox_file
from graphpp.runtime.messages.mailbox import Mailbox, Message
from graphpp.runtime.messages.wire_layout import layout_of
from graphpp.runtime.program import TensorMeta
from graphpp.schedules.table.costs import DEPTH
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def cube(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(-30, 30).to(dtype).view(3, 4, 5)


VALUES: dict[str, Callable[[], Tensor]] = {
    "dense": cube,
    "transposed": lambda: cube().transpose(0, 2),
    "permuted": lambda: cube().permute(1, 2, 0),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": lambda: cube()[:, ::2],
    "a column": lambda: cube()[..., 1],
    "a transposed part": lambda: cube()[:, 1:3].transpose(0, 2),
    "a row": lambda: cube()[1],
    "expanded": lambda: cube()[:1].expand(7, 4, 5),
    "expanded and permuted": lambda: cube()[:, :1].expand(3, 9, 5).permute(2, 1, 0),
    "one number, repeated": lambda: torch.tensor(2.5).expand(3, 2),
    "windows": lambda: torch.arange(9.0).unfold(0, 3, 1),
    "windows of rows, transposed": lambda: cube().unfold(1, 2, 1).transpose(0, 3),
    "windows, repeated": lambda: torch.arange(9.0).unfold(0, 4, 2).expand(2, 3, 4),
    "0-dim": lambda: torch.tensor(-0.0),
    "empty": lambda: torch.empty(0, 3),
    "empty, transposed": lambda: torch.empty(3, 0).t(),
    "empty, one number repeated": lambda: torch.tensor(2.5).expand(0, 3),
    "empty, expanded": lambda: cube()[:1, :, None].expand(3, 4, 0, 5),
    "empty windows, repeated": lambda: cube().unfold(1, 2, 1)[:, :0].expand(2, 3, 0, 5, 2),
    "bool": lambda: cube() > 0,
    "int64": lambda: cube(torch.int64).transpose(0, 1),
    "uint8": lambda: cube(torch.uint8),
    "bfloat16": lambda: cube(torch.bfloat16).transpose(1, 2),
    "float16": lambda: cube(torch.float16),
    "float64": lambda: cube(torch.float64),
    "complex64": lambda: torch.complex(cube(), cube().flip(0)).transpose(0, 2),
    "conjugate": lambda: torch.complex(cube(), cube().flip(0)).conj(),
    "negative": lambda: torch.complex(cube(), cube().flip(0)).conj().imag,
    "nan and inf": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
}


def meta_of(value: Tensor, name: str = "x") -> TensorMeta:
    return TensorMeta(name, tuple(value.shape), tuple(value.stride()), value.dtype)


def bits(value: Tensor) -> list[object]:
    """Type, shape and elements as bytes."""
    dense = value.resolve_conj().resolve_neg().contiguous()
    return [value.dtype, list(value.shape), dense.reshape(-1).view(torch.uint8).tolist() if dense.numel() else []]


def landed(value: Tensor, meta: TensorMeta) -> Tensor:
    """A value after packing and unpacking."""
    layout = layout_of(meta)
    buffer = layout.buffer(CPU)
    buffer.elements.copy_(layout.pack(value))
    return buffer.value()


@pytest.mark.parametrize("name", VALUES)
def test_packing_keeps_bits_and_strides(name: str) -> None:
    value = VALUES[name]()
    packed, arrived = layout_of(meta_of(value)).pack(value), landed(value, meta_of(value))
    assert packed.is_contiguous()
    assert bits(arrived) == bits(value)
    assert arrived.stride() == value.stride()


@pytest.mark.parametrize("name", ["dense", "transposed", "permuted", "a row", "expanded", "channels last", "0-dim"])
def test_what_lies_dense_is_sent_from_where_it_lies(name: str) -> None:
    value = VALUES[name]()
    assert layout_of(meta_of(value)).pack(value).data_ptr() == value.data_ptr()


def test_a_kernel_that_returned_other_strides_is_corrected() -> None:
    captured, value = meta_of(cube().transpose(0, 1)), cube().transpose(0, 1).contiguous()
    arrived = landed(value, captured)
    assert torch.equal(arrived, value)
    assert arrived.stride() == captured.stride


@given(st.data())
def test_any_view_arrives_as_it_was(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim in range(value.dim()):
        step, start = data.draw(st.sampled_from([1, 1, 2, 3])), data.draw(st.integers(0, 1))
        value = value[(slice(None),) * dim + (slice(start, None, step),)]
        if value.shape[dim] == 1 and data.draw(st.booleans()):
            value = value.expand(*value.shape[:dim], data.draw(st.sampled_from([0, 3])), *value.shape[dim + 1 :])
    value = value.permute(data.draw(st.permutations(range(value.dim()))))
    arrived = landed(value, meta_of(value))
    assert torch.equal(arrived, value)
    assert arrived.stride() == value.stride()


class Fake:
    """A message handle that is complete when the test sets it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.finished = log, name, False

    def is_completed(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.log.append(self.name)
        if self.name == "broken":
            raise RuntimeError("connection closed")


def outgoing(names: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Mailbox, list[str]]:
    mailbox, log = Mailbox(None, CPU), list[str]()
    for name in names:
        monkeypatch.setattr("graphpp.runtime.messages.mailbox.post", lambda parcel, over, name=name: [Fake(log, name)])
        mailbox.start([Message(1, outgoing=True)])
    return mailbox, log


def test_only_so_many_sends_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"send {index}" for index in range(DEPTH + 2)]
    mailbox, log = outgoing(names, monkeypatch)
    assert log == names[:2]
    mailbox.flush()
    assert log == names
    mailbox.drop()


def test_a_lost_neighbour_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, _ = outgoing(["broken"], monkeypatch)
    with pytest.raises(PeerLost) as caught:
        mailbox.flush()
    assert caught.value.peer == 1


def batched(monkeypatch: pytest.MonkeyPatch, works: list[Fake], broken: bool = False) -> Mailbox:
    """A mailbox whose next batch gets these handles."""

    def post_all(ops: list[dist.P2POp]) -> list[Fake]:
        if broken:
            raise RuntimeError("connection closed")
        return works

    monkeypatch.setattr(dist, "batch_isend_irecv", post_all)
    monkeypatch.setattr(mailbox_file, "_operation", lambda parcel, value, group: value)  # there is no group
    return Mailbox(None, CPU, batched=True)


def parcel(peer: int, count: int = 1, *, outgoing: bool = True) -> Message:
    values = [torch.zeros(1) for _ in range(count)]
    layouts = [layout_of(meta_of(value)) for value in values]
    mailbox = Mailbox(None, CPU)
    return mailbox.outgoing(values, layouts, peer) if outgoing else mailbox.incoming(layouts, peer)


def test_each_message_of_a_batch_has_its_own_works(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    mailbox = batched(monkeypatch, [Fake(log, name) for name in "abcd"])
    parcels = [parcel(1, 1), parcel(2, 2, outgoing=False), parcel(3, 0), parcel(2, 1)]
    mailbox.start(parcels)
    parcels[1].wait()
    assert log == ["b", "c"]
    parcels[2].wait()
    assert log == ["b", "c"]
    mailbox.flush()
    assert sorted(log) == ["a", "b", "c", "d"]


def test_one_work_for_a_whole_batch_is_waited_for_by_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """One handle for the whole batch, as on NCCL."""
    log: list[str] = []
    mailbox = batched(monkeypatch, [Fake(log, "all")])
    parcels = [parcel(1, 2), parcel(2, 1, outgoing=False)]
    mailbox.start(parcels)
    parcels[1].wait()
    assert log == ["all"]
    mailbox.flush()
    assert log == ["all", "all"]


def test_a_batch_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    mailbox = batched(monkeypatch, [Fake(log, "first")])
    for _ in range(DEPTH):
        mailbox.start([parcel(1)])
    assert log == []
    mailbox.start([parcel(2), parcel(1, outgoing=False)])
    assert log == []
    mailbox.start([parcel(1), parcel(1)])
    assert log == ["first"] * 2


@pytest.mark.parametrize(("peers", "named"), [((1,), 1), ((1, 1), 1), ((1, 2), None)])
def test_a_batch_that_cannot_be_posted_names_its_peer(
    peers: tuple[int, ...], named: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox = batched(monkeypatch, [], broken=True)
    with pytest.raises(PeerLost) as caught:
        mailbox.start([parcel(peer) for peer in peers])
    assert caught.value.peer == named


def exchange(rank: int) -> list[list[object]]:
    """Both ranks send two messages and receive two in one call; returns the received values."""
    values = [[make()] for make in VALUES.values()][:2]
    layouts = [[layout_of(meta_of(value[0]))] for value in values]
    mailbox, peer = Mailbox(dist.group.WORLD, CPU, batched=True), 1 - rank
    sends = [mailbox.outgoing([value[0] + rank], layout, peer) for value, layout in zip(values, layouts, strict=True)]
    receives = [mailbox.incoming(layout, peer) for layout in layouts]
    mailbox.start([sends[0], *receives, sends[1]] if rank else [*receives, *sends])
    arrived = [bits(mailbox.wait(parcel)[0]) for parcel in reversed(receives)]
    mailbox.flush()
    return arrived[::-1]


def test_both_directions_in_one_call() -> None:
    for rank, arrived in enumerate(run_ranks(exchange, 2)):
        assert arrived == [bits(make() + 1 - rank) for make in list(VALUES.values())[:2]]
