"""The test models train, repeatably, and the eager reference leaves the caller's model alone."""

import pytest
import torch

from tests.models import MODELS, batches
from tests.reference import eager_steps, gradients, model_loss

NAMES = sorted(MODELS)


@pytest.mark.parametrize("name", NAMES)
def test_loss_falls_and_repeats_bit_for_bit(name: str) -> None:
    case = MODELS[name]()
    first = eager_steps(case.model, case.loss, [case.batch], microbatches=3, steps=4)
    second = eager_steps(MODELS[name]().model, case.loss, [case.batch], microbatches=3, steps=4)
    assert first.losses[-1].mean() < first.losses[0].mean()
    assert first.params.keys() == second.params.keys()
    assert all(torch.equal(first.params[key], second.params[key]) for key in first.params)


@pytest.mark.parametrize("name", NAMES)
def test_microbatches_add_up_to_the_batch(name: str) -> None:
    case = MODELS[name]()
    parts = eager_steps(case.model, case.loss, [case.batch], microbatches=8, steps=1).grads[0]
    model_loss(case.model, case.loss, case.batch).backward()
    for key, whole in gradients(case.model).items():
        torch.testing.assert_close(parts[key], whole, rtol=1e-4, atol=1e-6)


def test_batches_differ_and_repeat() -> None:
    first, second = batches("llama", 2)
    assert not torch.equal(first.args[0], second.args[0])
    assert torch.equal(first.args[0], MODELS["llama"]().batch.args[0])


def test_rows_must_divide() -> None:
    with pytest.raises(ValueError, match="24 rows do not divide into 7"):
        MODELS["llama"]().batch.microbatches(7)


def test_sum_is_mean_times_microbatches() -> None:
    case = MODELS["sequential"]()
    mean = eager_steps(case.model, case.loss, [case.batch], 8, steps=1).grads[0]
    total = eager_steps(case.model, case.loss, [case.batch], 8, steps=1, reduction="sum").grads[0]
    for key, value in mean.items():
        assert value is not None
        torch.testing.assert_close(total[key], value * 8)
