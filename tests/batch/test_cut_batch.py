"""The cutter keeps what it knows of earlier batches: paths by structure, signatures by layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils import _pytree

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


class Scaled:
    """A tensor and a mapping, which is the context of the class's structure."""

    def __init__(self, x: torch.Tensor, context: dict[str, object]) -> None:
        self.x, self.context = x, context


_pytree.register_pytree_node(
    Scaled,
    lambda each: ([each.x], each.context),
    lambda values, context: Scaled(*values, context),
    serialized_type_name="tests.batch.Scaled",
    flatten_with_keys_fn=lambda each: ([(_pytree.GetAttrKey("x"), each.x)], each.context),
)


def test_a_structure_with_data_of_a_registered_class_is_read_anew() -> None:
    """The context changes in place, or is equal to that of an earlier batch and another number."""
    cutter, context = BatchCutter(), dict[str, object](scale=1)
    found = []
    for scale in (1, 2, True, 1.0, 0.0, -0.0):
        context["scale"] = scale
        for given in (context, dict(context)):
            piece = cutter.cut(cutter.flat(Microbatch((Scaled(X, given),))), 3)[0]
            assert piece.signature == replace(piece).signature
            assert piece.microbatch().args[0].context is given
            found.append(piece.signature)
    assert len(set(found)) == 6
