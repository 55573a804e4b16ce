"""Well-known models under a backend: `graphpp.verify` compares their compiled stages with the uncut graph, and that with eager.

`make test` takes one model, with regions that no compiler changes: tests/backends has a small model under Inductor.
`make test-all` compiles two models that are made of other things, `GRAPHPP_INDUCTOR=1 pytest -m "" tests/zoo/test_backends.py`
compiles all.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, fx

import graphpp
from tests.exhaustive import further
from tests.zoo.models import ZOO, Entry
from tests.zoo.running import example

COMPILED = sorted(ZOO) if os.environ.get("GRAPHPP_INDUCTOR") else ["gpt2", "resnet"]


def interpreted(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    return module


def verified(entry: Entry, backend: Any) -> graphpp.Verification:
    return graphpp.verify(
        entry.model(0.1) if entry.dropout else entry.model(),
        entry.loss,
        example(entry.batch(0)),
        split=2,
        schedule="ZB1P",
        microbatches=2,
        backend=backend,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["clip", *further("mixtral", "t5", "unet")])
def test_regions_taken_out(name: str) -> None:
    found = verified(ZOO[name], interpreted)
    assert found.cut.verdict in ("equal", "close"), str(found)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_under_inductor(name: str) -> None:
    found = verified(ZOO[name], "inductor")
    assert found.cut.verdict in ("equal", "close"), str(found)
