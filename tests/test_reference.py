"""The test models train, repeatably, and the eager reference leaves the caller's model alone."""

import pytest
import torch

from tests.models import LAYERS, MODELS, batches, cuts
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
def test_callers_model_stays_as_it_was(name: str) -> None:
    case, fresh = MODELS[name](), MODELS[name]()
    eager_steps(case.model, case.loss, batches(name, 2), microbatches=8, steps=2, max_norm=1.0)
    assert all(gradient is None for gradient in gradients(case.model).values())
    assert case.model.training
    for key, value in fresh.model.state_dict().items():
        assert torch.equal(case.model.state_dict()[key], value)


@pytest.mark.parametrize("name", NAMES)
def test_microbatches_add_up_to_the_batch(name: str) -> None:
    case = MODELS[name]()
    parts = eager_steps(case.model, case.loss, [case.batch], microbatches=8, steps=1).grads[0]
    model_loss(case.model, case.loss, case.batch).backward()
    for key, whole in gradients(case.model).items():
        torch.testing.assert_close(parts[key], whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_modules(name: str) -> None:
    model = MODELS[name]().model
    for fqn in LAYERS[name]:
        model.get_submodule(fqn)
    assert cuts(name, 4) == LAYERS[name][1:]
    assert cuts(name, 2) == [LAYERS[name][2]]


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
