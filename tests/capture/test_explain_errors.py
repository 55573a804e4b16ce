"""Errors of a trace name the user's line and a remedy that fits the fault."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.errors import CaptureError
from tests.zoo.models import ZOO


def test_eager_experts_name_the_entry_of_the_configuration_and_another_implementation() -> None:
    entry = ZOO["mixtral"]
    model, batch = entry.model(), entry.batch(0)
    model.config._experts_implementation = "eager"
    words = r"_mixtral\.py:\d+ in forward(.|\n)*MixtralExperts loops .* config\._experts_implementation = 'grouped_mm'"
    with pytest.raises(CaptureError, match=words):
        graphpp.compile(model, entry.loss, split=2, microbatches=2).step(**batch.kwargs)
    model.config._experts_implementation = "grouped_mm"  # the remedy, on the same model
    assert graphpp.compile(model, entry.loss, split=2, microbatches=2).step(**batch.kwargs).loss.isfinite()


class Steered(nn.Module):
    """Lets a value of a tensor steer Python, and has a configuration that chose no implementation on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = type("Config", (), {"_experts_implementation": "eager"})()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_a_configuration_that_chose_nothing_is_no_remedy() -> None:
    with pytest.raises(CaptureError, match=r"torch\.where") as raised:
        graphpp.compile(Steered(), F.mse_loss).step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert "_experts_implementation" not in str(raised.value)
