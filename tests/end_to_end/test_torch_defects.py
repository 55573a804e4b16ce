"""One test per defect of `torch.distributed.pipelining` 2.13 that graphpp must not have; `graphpp doctor` names all tests."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks
from tests.special_models import CUTS, SPECIAL
from tests.training import compiled, step


def test_no_run_to_find_shapes_touches_batch_norm() -> None:
    """A manual stage of torch's runs once on uninitialised memory: 5 batches counted instead of 4, statistics of 1e34."""
    case = SPECIAL["norms"]()
    pipe = compiled(case, split=CUTS[2], microbatches=4, schedule="GPipe")
    step(pipe, case.batch)
    for layer in case.model.layers:
        assert layer[1].num_batches_tracked == 4
        assert layer[1].running_mean.abs().max() < 100


def held_twice(rank: int) -> dict[str, bool]:
    """With two stages a rank, what rank 0 holds of a parameter tied between its two stages."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[2].weight = layers[0].weight
    model = nn.Sequential(*layers)
    pipe = graphpp.compile(model, F.mse_loss, split=["1", "2", "3"], schedule="Interleaved1F1B", microbatches=2)
    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    names = [fqn for fqn, _ in pipe.named_parameters()]
    return {"once": names.count("0.weight") == (rank == 0), "one": model[2].weight is model[0].weight}


def test_a_rank_that_uses_a_tied_parameter_in_two_stages_holds_it_once() -> None:
    assert run_ranks(held_twice, 2) == [{"once": True, "one": True}] * 2


class Dropped(nn.Module):
    """Dropout after each of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def losses(rank: int, **options: Any) -> Tensor:
    torch.manual_seed(0)
    pipe = graphpp.compile(Dropped(), F.mse_loss, microbatches=4, **options)
    torch.manual_seed(1)
    return pipe.step(torch.ones(8, 8), target=torch.zeros(8, 8)).losses


def two_ranks(rank: int) -> Tensor:
    return losses(rank, split=["layers.1", "layers.2", "layers.3"], schedule="Interleaved1F1B")


def test_dropout_is_that_of_one_process() -> None:
    """In torch's pipeline it depends on the ranks."""
    expected = losses(0, split=1)
    assert len(set(expected.tolist())) == 4
    for found in run_ranks(two_ranks, 2):
        assert torch.equal(found, expected)
