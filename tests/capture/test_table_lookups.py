"""Look-ups by position beyond a table's rows are refused at the capture; models without such a table take any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.capture.trace import capture
from graphpp.errors import CaptureError

ROWS, WIDTH = 8, 4
HOW: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "embedding": lambda table, at: table(at),
    "index": lambda table, at: table.weight[at],
    "index_select": lambda table, at: table.weight.index_select(0, at),
    "counted": lambda table, at: table(torch.ones_like(at).cumsum(0) - 1),
    "from the end": lambda table, at: table.weight[-1 - at],
    "clamped": lambda table, at: table(at.clamp(max=ROWS - 1)),
    "periodic": lambda table, at: table(at % ROWS),
    "computed": lambda table, at: torch.sin(at[:, None] * torch.arange(WIDTH)) + table.weight[0],
}
ANY_LENGTH = {"clamped", "periodic", "computed"}


class Positions(nn.Module):
    """Tokens, and a table of eight positions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.tokens, self.positions = how, nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        at: Any = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + HOW[self.how](self.positions, at)


def captured(how: str, length: int, device: str) -> None:
    with torch.device("meta"):
        model = Positions(how)
    tokens, target = (torch.zeros(2, length, *rest, device=device) for rest in ((), (WIDTH,)))
    capture(model, F.mse_loss, graphpp.Microbatch((tokens.long(),), target=target), torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", HOW)
def test_a_row_that_the_table_lacks_is_refused(how: str, device: str) -> None:
    captured(how, ROWS, device)
    if how in ANY_LENGTH:
        captured(how, 2 * ROWS, device)
    else:
        with pytest.raises(CaptureError, match=r"looks up row 8 of positions\.weight, which has 8 rows"):
            captured(how, ROWS + 1, device)
