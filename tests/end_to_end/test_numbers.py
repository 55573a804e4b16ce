"""The issue's matrix: every model, number of ranks and stages, schedule and number of microbatches gives the same bits.

Cut against the uncut joint graph (one stage in one process) always, and the uncut graph against a plain eager loop
wherever that is possible at all; three steps of AdamW with clipping, each on another batch.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.models import cuts
from tests.training import Numbers, differences, eager, train, trained, whole

ONE_STAGE_A_RANK = ("GPipe", "1F1B")
SEVERAL = ("Interleaved1F1B", "LoopedBFS")

# Through the model's own loss (labels=) nothing changes but the end of the graph: one combination each will do.
MATRIX = ("llama", "hf_llama", "hf_gpt2", "hf_vit", "sequential")
OWN_LOSS = ("hf_llama_labels", "hf_gpt2_labels", "hf_vit_labels")

# The uncut joint graph differs from eager in the last bits: without a cache transformers looks in the position ids for packed
# sequences, and where they have no data it assumes that there may be some: it writes out the causal mask and repeats the
# grouped heads, both of which eager lets the attention kernel do.
INEXACT = ("hf_llama", "hf_llama_labels")


# What `make test` runs: one rank and two, both numbers of microbatches, with a plain model; decoders are in other tests.
KINDS = [("sequential", 2, 3), ("sequential", 1, 8)]
ALL = [(name, ranks, microbatches) for name in MATRIX for ranks in (1, 2, 4) for microbatches in (8, 3)]
UNCUT = [("sequential", 8), ("sequential", 3), ("hf_gpt2_labels", 8)]


class Combo(NamedTuple):
    """How a model is run."""

    schedule: str
    stages: int
    microbatches: int


def combos(ranks: int) -> list[Combo]:
    """What fits: stages are dealt evenly, and GPipe and 1F1B put one on a rank (or all on one)."""
    return [
        Combo(schedule, stages, microbatches)
        for stages in (2, 4)
        if stages % ranks == 0
        for microbatches in (8, 3)
        for schedule in (*ONE_STAGE_A_RANK, *SEVERAL)
        if ranks in (1, stages) or schedule in SEVERAL
    ]


def train_all(rank: int, name: str, cases: Sequence[Combo]) -> list[Numbers]:
    """This rank's numbers under every combination."""
    found = []
    for combo in cases:
        options = {"split": cuts(name, combo.stages), "schedule": combo.schedule, "microbatches": combo.microbatches}
        found.append(train(rank, name, options))
    return found


@cache
def uncut(name: str, microbatches: int) -> Numbers:
    return trained(1, name, split=1, microbatches=microbatches)


def test_the_matrix_is_whole() -> None:
    assert {ranks: len(combos(ranks)) for ranks in (1, 2, 4)} == {1: 16, 2: 12, 4: 8}


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [*UNCUT, *further(*(each for name in (*MATRIX, *OWN_LOSS) for each in ((name, 8), (name, 3)) if each not in UNCUT))],
)
def test_the_uncut_graph_gives_the_numbers_of_eager(name: str, microbatches: int) -> None:
    mine, theirs = uncut(name, microbatches), eager(name, microbatches)
    if name not in INEXACT:
        assert differences(mine, theirs) == []
        return
    torch.testing.assert_close(mine.losses[0], theirs.losses[0], rtol=1e-6, atol=0)
    for fqn, grad in theirs.grads[0].items():
        found = mine.grads[0][fqn]
        assert grad is not None and found is not None
        assert (found - grad).norm() <= 1e-6 * grad.norm(), fqn


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [*KINDS, *further(*(each for each in ALL if each not in KINDS))])
def test_cut_and_uncut_are_the_same_bits(name: str, ranks: int, microbatches: int) -> None:
    cases = [combo for combo in combos(ranks) if combo.microbatches == microbatches]
    by_rank = [train_all(0, name, cases)] if ranks == 1 else run_ranks(train_all, ranks, name, cases)
    for combo, *parts in zip(cases, *by_rank, strict=True):
        assert differences(whole(parts), uncut(name, combo.microbatches)) == [], combo


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["hf_gpt2_labels", *further("hf_llama_labels", "hf_vit_labels")])
def test_cut_and_uncut_are_the_same_bits_with_the_models_own_loss(name: str) -> None:
    mine = trained(2, name, split=cuts(name, 2), schedule="1F1B", microbatches=8)
    assert differences(mine, uncut(name, 8)) == []
