"""Graphs with open sizes: at unseen sizes, models of the zoo train bit for bit as graphs of those sizes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import graphpp
from graphpp import Debug
from graphpp.batch.microbatch import FlatMicrobatch
from tests import internals
from tests.exhaustive import examples, further
from tests.zoo.models import ZOO

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # PEFT's, about transformers
)
# not Mixtral, whose auxiliary loss divides a size twice: each of its sizes is captured by itself
OPEN = {
    "llama": 2, "qwen3": 2, "gemma": 2, "gpt2": 2, "mistral": 2, "bert": 2, "albert": 2, "t5": 3, "whisper": 2,
    "vit": 1, "resnet": 2, "unet": 2, "clip": 1, "lora_llama": 2, "mamba": 2,
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["resnet", *further(*(name for name in OPEN if name != "resnet"))])
def test_sizes_that_the_trace_has_not_seen(name: str) -> None:
    entry = ZOO[name]
    model = entry.model()
    twin = deepcopy(model)
    example = entry.batch(0)
    first = FlatMicrobatch.of(graphpp.Microbatch(example.args, example.kwargs, example.target))
    options: dict[str, Any] = {"split": 2, "schedule": "1F1B", "microbatches": 1}
    with internals.captures() as captured:
        pipe = graphpp.compile(model, entry.loss, debug=Debug(dynamic=True), **options)
        pipe.step_microbatches([first.microbatch()])
        symbols = captured[-1].joint.symbols
        assert symbols is not None and len({first.shapes[at][dim] for at, dim in symbols.free}) >= 1
        others = resized(first, symbols)
        assert len(others) >= OPEN[name], "the model fixes its sizes"
        taken = examples(len(others))
        static = graphpp.compile(twin, entry.loss, debug=Debug(dynamic=False), **options)
        static.step_microbatches([first.microbatch()])
        for other in others[:: -(-len(others) // taken)]:
            before = len(captured)
            found, wanted = (each.step_microbatches([other.microbatch()]) for each in (pipe, static))
            assert len(captured) == before + 1, "the graph does not serve the size"
            assert torch.equal(found.losses, wanted.losses)
            for (fqn, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), fqn
                assert mine.grad is None or torch.equal(mine.grad, theirs.grad), fqn
            for (fqn, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
                assert torch.equal(mine, theirs), fqn


def resized(first: FlatMicrobatch, symbols: Any) -> list[FlatMicrobatch]:
    """The microbatch with more or fewer elements where dimensions are open, as far as these fit.

    Open dimensions of one size change together, or only those at one place: all rows, for instance.
    """
    found: dict[str, FlatMicrobatch] = {}
    for size in sorted({first.shapes[at][dim] for at, dim in symbols.free}):
        for place in (None, 0, 1, 2):
            for new in (size + 1, size - 2, 2 * size, size - 3):
                shapes = [list(shape) for shape in first.shapes]
                for at, dim in symbols.free:
                    if shapes[at][dim] == size and place in (None, dim):
                        shapes[at][dim] = new
                if new > 1 and shapes != [*map(list, first.shapes)] and symbols.values(shapes) is not None:
                    found[str(shapes)] = _resized(first, shapes)
    return list(found.values())


def _resized(first: FlatMicrobatch, shapes: Sequence[Sequence[int]]) -> FlatMicrobatch:
    remaining = iter(shapes)

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for dim, size in enumerate(next(remaining)):
            leaf = leaf.index_select(dim, torch.arange(size) % leaf.shape[dim])
        return leaf.contiguous()

    return FlatMicrobatch(first.spec, first.paths, tuple(map(changed, first.values)))
