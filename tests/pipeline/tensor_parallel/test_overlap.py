"""OVERLAP_F_B over ranks that share layers: their collectives are in flight while the other microbatch computes."""

from __future__ import annotations

import pytest
import torch

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.internals import woven_programs
from tests.sharding import Mesh
from tests.tensor_parallel import batch, compiled, decoder, spread

TABLE = "r0 0F0 1F0 (0F1;1B0) (1F1;0B0) (0F2;1B1) (1F2;0B1) (0F3;1B2) (1F3;0B2) 1B3 0B3"
TENSOR = Mesh((2,), ("tp",))


def in_flight(text: str) -> dict[str, set[str]]:
    """For each collective in a woven text, the parts whose matrices are multiplied between its start and its wait."""
    pending: dict[str, set[str]] = {}
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        name, _, right = line.strip().partition(" = ")
        operator = right.partition("(")[0].removeprefix("__c10d_functional_")
        if operator in ("all_reduce_default", "all_gather_into_tensor_default", "reduce_scatter_tensor_default"):
            pending[name] = set()
        elif operator == "wait_tensor_default":
            sent = right.partition("(")[2].partition(")")[0]
            found[sent] = pending.pop(sent)
        elif operator.endswith("mm_default"):
            for between in pending.values():
                between.add(name.partition("_")[0])
    assert not pending
    return found


def covered(rank: int, sequence: bool) -> tuple[list[str], list[float]]:
    """Gradients with other bits than under 1F1B, and for each woven program the share of covered collectives."""
    torch.set_num_threads(1)
    made, grads = TENSOR.made(), []
    tokens, target = batch(1)
    for schedule in (graphpp.Schedule.parse(TABLE.replace(")", ")OVERLAP_F_B")), "1F1B"):
        pipe = compiled(made, spread(decoder(layers=4), made["tp"], sequence=sequence), split=["layers.2"], schedule=schedule)
        pipe.step(tokens, target=target)
        grads.append({fqn: each.grad for fqn, each in pipe.named_parameters()})
        if schedule != "1F1B":
            flights = [in_flight(each.source) for each in woven_programs(pipe)]
    shares = [sum(bool(by - {name.partition("_")[0]}) for name, by in each.items()) / len(each) for each in flights]
    unlike = [fqn for fqn, gradient in grads[0].items() if not torch.equal(_local(gradient), _local(grads[1][fqn]))]
    return unlike, shares


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sequence", "least"), [(False, 0.8), *further((True, 0.4))])  # SP gathers thrice for three products
def test_collectives_of_layers_hide_under_the_other_microbatch(sequence: bool, least: float) -> None:
    for unlike, shares in run_ranks(covered, 2, sequence):
        assert unlike == []
        assert shares
        assert min(shares) >= least
