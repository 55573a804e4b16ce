"""The cutter keeps what it knows of earlier batches: paths by structure, and by layout how a batch is cut."""

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
    cases = [(batch, count) for batch in (*BATCHES, *reversed(BATCHES)) for count in (3, 2, 3, 1)]
    for batch, count in cases:
        described, fresh = used.describe(), BatchCutter()
        pieces, expected = (cutter.cut(cutter.flat(batch), count) for cutter in (used, fresh))
        assert used.describe() == (fresh.describe() or described)  # one microbatch says nothing of a cut
        for piece, other in zip(pieces, expected, strict=True):
            assert (piece.paths, piece.spec, piece.rows) == (other.paths, other.spec, other.rows)
            assert list(map(repr, piece.values)) == list(map(repr, other.values))
            assert piece.signature == replace(other).signature  # a copy, which makes its own
    assert len({pieces[0].signature for pieces in (used.cut(used.flat(batch), 3) for batch in BATCHES)}) == len(BATCHES)


def test_each_batch_of_a_layout_is_cut_with_its_own_values() -> None:
    cutter = BatchCutter()
    for step in range(3):
        batch = Microbatch((torch.full((7, 4), float(step)), "text"), {}, torch.full((7,), step))
        pieces = cutter.cut(cutter.flat(batch), 3)
        assert [piece.rows for piece in pieces] == [3, 3, 1]
        assert all("text" in piece.values for piece in pieces)
        assert all(bool((each == step).all()) for piece in pieces for each in piece.tensors.values())


def test_the_marks_of_an_example_are_made_anew() -> None:
    """A short last batch has the example's shapes: the tensors that were not cut in the batch before stay whole."""
    mask = torch.ones(4, 4)
    cutter = BatchCutter(Microbatch((torch.zeros(4, 2), mask)))
    for rows, counts in ((8, [2] * 4), (4, [1] * 4), (8, [2] * 4), (4, [1] * 4)):
        pieces = cutter.cut(cutter.flat(Microbatch((torch.zeros(rows, 2), mask))), 4)
        assert [piece.rows for piece in pieces] == counts
        assert all(piece.tensors["args[1]"].shape == (4, 4) for piece in pieces)


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
