"""Audits of the zoo's models over 50 steps: every model is audited, and none gives a false alarm."""

import logging

import pytest
import torch

import graphpp
from tests.exhaustive import further
from tests.zoo.models import ZOO

KINDS = ("gpt2",)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [*KINDS, *further(*(name for name in ZOO if name not in KINDS))])
def test_no_false_alarm(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.model()
    batch = entry.batch(0)
    caplog.set_level(logging.WARNING, "graphpp")
    pipe = graphpp.compile(model, entry.loss, split=1, microbatches=1, debug=graphpp.Debug(audit=7))
    pipe.step(*batch.args, target=batch.target, **batch.kwargs)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    for _ in range(50):
        pipe.step(*batch.args, target=batch.target, **batch.kwargs)
        optimizer.step()
        optimizer.zero_grad()
    assert "not audited" not in caplog.text
