"""Models and examples that cannot be planned are refused in one sentence, before a graph has grown large."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpp.batch.microbatch import Microbatch
from graphpp.cluster_planner.costs import capture_costs
from graphpp.errors import CaptureError

DIM = 8


class Scan(nn.Module):
    """A recurrence in a loop over the positions of [rows, positions, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for position in range(x.shape[1]):
            state = torch.tanh(self.linear(x[:, position]) + state)
        return state


def costs(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32, param_dtype: torch.dtype | None = None) -> object:
    example = Microbatch((torch.zeros(shape, dtype=dtype),), {}, torch.zeros(shape[0], DIM, dtype=dtype))
    return capture_costs(model, F.mse_loss, example, param_dtype=param_dtype)


def test_a_loop_over_many_positions_is_refused_with_its_module_and_line() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), Scan())
    with pytest.raises(CaptureError, match=r"^cluster costs: 1 runs .* loop at .*test_refusals.py:27 in forward") as error:
        costs(model, 2, 4096, DIM)
    assert len(str(error.value).splitlines()) == 1


def test_many_layers_and_short_loops_are_no_long_loop() -> None:
    layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(80)]
    assert costs(nn.Sequential(*layers, Scan()), 2, 6, DIM)


def test_numbers_in_another_dtype_than_the_parameters_are_named() -> None:
    sentence = r"^example: args\[0\] is in torch.float32, and the parameters were captured in torch.bfloat16: give .*dtype=None"
    with pytest.raises(CaptureError, match=sentence) as error:
        costs(nn.Linear(DIM, DIM), 2, DIM, param_dtype=torch.bfloat16)
    assert len(str(error.value).splitlines()) == 1


class RowsLast(nn.Module):
    """Adds numbers whose rows are the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return self.linear(x) + more.sum(0)[:, None]  # type: ignore[no-any-return]


def test_rows_in_another_dimension_are_refused() -> None:
    example = Microbatch((torch.zeros(2, DIM), torch.zeros(3, 2)), {}, torch.zeros(2, DIM))
    with pytest.raises(CaptureError, match=r"runs with 2 rows, and not with 4: each tensor .* as its first dimension") as error:
        capture_costs(RowsLast(), F.mse_loss, example, param_dtype=None)
    assert len(str(error.value).splitlines()) == 1
