"""Errors of a trace name the user's line and a remedy that fits the fault."""

import pytest

import graphpp
from graphpp.errors import CaptureError
from tests.zoo.models import ZOO


@pytest.mark.exhaustive
def test_eager_experts_name_the_entry_of_the_configuration_and_another_implementation() -> None:
    entry = ZOO["mixtral"]
    model, batch = entry.model(), entry.batch(0)
    model.config._experts_implementation = "eager"
    words = r"_mixtral\.py:\d+ in forward(.|\n)*loops over experts unless config\._experts_implementation = 'grouped_mm'"
    with pytest.raises(CaptureError, match=words):
        graphpp.compile(model, entry.loss, split=2, microbatches=2).step(**batch.kwargs)
    model.config._experts_implementation = "grouped_mm"  # the remedy, on the same model
    assert graphpp.compile(model, entry.loss, split=2, microbatches=2).step(**batch.kwargs).loss.isfinite()
