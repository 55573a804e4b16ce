"""How a batch is cut: rows, signatures, and tensors with the shape of the example."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphpp.batch.cut_batch import BatchCutter, microbatch_sizes
from graphpp.batch.microbatch import FlatMicrobatch, Microbatch, whole

X = torch.zeros(7, 4)
BATCHES = (
    Microbatch((X,), {}, X),
    Microbatch((X, X)),
    Microbatch((X,), {"mask": X}),
    Microbatch((X[:6],), {}, X[:6]),
    Microbatch((X.double(),), {}, X),
    Microbatch((torch.zeros(4, 7).t(),), {}, X),
    Microbatch((X, 1)),
    Microbatch((X, True)),
    Microbatch((X, "1")),
    Microbatch((X, whole(torch.zeros(7)))),
    Microbatch((X, whole([torch.zeros(7)]))),
)


def test_pieces_of_as_many_rows_share_the_signature_that_each_would_make() -> None:
    cutter, signatures = BatchCutter(), set()
    for batch in BATCHES:
        pieces = cutter.cut(FlatMicrobatch.of(batch), 3)
        assert [piece.rows for piece in pieces] == ([2, 2, 2] if len(batch.args[0]) == 6 else [3, 3, 1])
        assert all(piece.signature == replace(piece).signature for piece in pieces)  # a copy makes its own
        assert pieces[0].signature is pieces[1].signature
        signatures.add(pieces[0].signature)
    assert len(signatures) == len(BATCHES)


def test_pieces_are_those_of_torch() -> None:
    """Those of `torch.chunk`, the last one smaller; where `torch.chunk` makes fewer, the even ones of `torch.tensor_split`."""
    for rows in range(1, 40):
        for count in range(1, rows + 1):
            batch, chunks = torch.zeros(rows), torch.zeros(rows).chunk(count)
            wanted = chunks if len(chunks) == count else batch.tensor_split(count)
            assert microbatch_sizes(rows, count) == [len(piece) for piece in wanted]
    assert microbatch_sizes(19, 8) == [3, 3, 3, 2, 2, 2, 2, 2]


def test_a_tensor_with_the_shape_of_the_example_stays_whole() -> None:
    """A short last batch has the example's shapes: the tensors that were not cut in the batch before stay whole."""
    mask = torch.ones(4, 4)
    cutter = BatchCutter(Microbatch((torch.zeros(4, 2), mask)))
    for rows, counts in ((8, [2] * 4), (4, [1] * 4), (8, [2] * 4), (4, [1] * 4)):
        pieces = cutter.cut(FlatMicrobatch.of(Microbatch((torch.zeros(rows, 2), mask))), 4)
        assert [piece.rows for piece in pieces] == counts
        assert all(piece.tensors["args[1]"].shape == (4, 4) for piece in pieces)
        assert cutter.describe() == "cut along dimension 0: args[0]; whole: args[1]"
