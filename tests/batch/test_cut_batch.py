"""The cutter keeps what it knows of earlier batches: paths by structure, signatures by layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphpp.batch.cut_batch import BatchCutter
from graphpp.batch.microbatch import Microbatch, whole

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


def test_a_batch_is_cut_alike_whatever_was_cut_before() -> None:
    used = BatchCutter()
    for batch in (*BATCHES, *reversed(BATCHES)):
        fresh = BatchCutter()
        pieces, expected = (cutter.cut(cutter.flat(batch), 3) for cutter in (used, fresh))
        for piece, other in zip(pieces, expected, strict=True):
            assert (piece.paths, piece.spec, piece.rows) == (other.paths, other.spec, other.rows)
            assert piece.signature == replace(other).signature  # a copy, which makes its own
    assert len({pieces[0].signature for pieces in (used.cut(used.flat(batch), 3) for batch in BATCHES)}) == len(BATCHES)


def test_pieces_of_as_many_rows_share_one_signature() -> None:
    cutter = BatchCutter()
    first, second, last = cutter.cut(cutter.flat(BATCHES[0]), 3)
    assert first.signature is second.signature
    assert last.rows == 1
    assert last.signature != first.signature
    assert cutter.cut(cutter.flat(BATCHES[0]), 3)[0].signature is first.signature
