"""The zoo's models: cut, uncut and eager give the same numbers."""

import pytest

from tests.exhaustive import further
from tests.zoo.models import ZOO
from tests.zoo.running import TOLERANCE, Visit, different, error, run_model

pytestmark = pytest.mark.filterwarnings(
    # peft 0.21 asks a model of transformers 5.23 by the old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


# A decoder with tied weights, and convolutions with running statistics; `make models` and the nightly run take all models.
KINDS = ("gpt2", "resnet")


def assert_cut_is_uncut(visit: Visit) -> None:
    """Bit-equal; gradients that several stages add to are summed in another order."""
    for run in visit.cut:
        assert set(different(run, visit.uncut)) <= run.shared, run.name
        assert error(run, visit.uncut) <= TOLERANCE, run.name
        assert all(forward > 0 for forward, _ in run.crossing), run.name


@pytest.mark.parametrize("name", [*KINDS, *further(*(name for name in ZOO if name not in KINDS))])
def test_a_model(name: str) -> None:
    visit = run_model(name)
    if ZOO[name].inexact:
        assert error(visit.uncut, visit.eager) <= TOLERANCE
        assert [what for what in different(visit.uncut, visit.eager) if what.startswith("buffer ")] == []
    else:
        assert different(visit.uncut, visit.eager) == []
    assert_cut_is_uncut(visit)
    assert_frozen_have_no_gradient(name, visit)


def assert_frozen_have_no_gradient(name: str, visit: Visit) -> None:
    frozen = [fqn for fqn, parameter in ZOO[name].model().named_parameters() if not parameter.requires_grad]
    assert frozen or name != "lora_llama"  # Whisper freezes its sinusoidal positions
    assert all(grads[fqn] is None for run in (visit.uncut, *visit.cut) for grads in run.grads for fqn in frozen)


@pytest.mark.exhaustive  # tests/end_to_end/test_torch_defects.py has dropout under a cut
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_with_dropout(name: str) -> None:
    assert ZOO[name].dropout
    visit = run_model(name, dropout=0.2)
    assert "losses" in different(visit.uncut, visit.eager)
    assert_cut_is_uncut(visit)
