"""State dicts over ranks, and models that have no memory yet."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.models import cuts
from tests.special_models import CUTS
from tests.training import CASES, compiled, example, same, step

OPTIONS = {"schedule": "1F1B", "microbatches": 4}


def split(name: str, stages: int = 2) -> Any:
    return cuts(name, stages) if name == "llama" else CUTS[stages]


def state_dicts(rank: int, name: str) -> dict[str, Tensor]:
    case = CASES[name]()
    pipe = compiled(case, split=split(name), example=example(case.batch, 4), **OPTIONS)
    return pipe.state_dict()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ["norms", "partial", "tied", *further("llama")])
def test_the_ranks_state_dicts_together_are_the_models(name: str) -> None:
    parts = run_ranks(state_dicts, 2, name)
    model = CASES[name]().model.state_dict()
    assert {fqn for part in parts for fqn in part} == model.keys()
    assert all(torch.equal(value, model[fqn]) for part in parts for fqn, value in part.items())
    assert all(len(part) < len(model) for part in parts)
    assert not any(value.requires_grad for part in parts for value in part.values())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(graphpp.GraphPPError, match="state_dict"):
        copied(compiled(CASES["norms"](), split=CUTS[2], **OPTIONS))


def load_and_step(rank: int, state: dict[str, Tensor]) -> Tensor:
    case = CASES["norms"]()
    pipe = compiled(case, split=CUTS[2], example=example(case.batch, 4), **OPTIONS)
    before = dict(pipe.named_parameters())
    pipe.load_state_dict(state)
    assert all(parameter is before[fqn] for fqn, parameter in pipe.named_parameters())
    assert all(same(value, state[fqn]) for fqn, value in pipe.state_dict().items())
    return step(pipe, case.batch).losses


def test_a_whole_models_state_dict_is_loaded_by_every_rank() -> None:
    twin = CASES["norms"]()
    with torch.no_grad():
        for tensor in twin.model.state_dict().values():
            tensor.add_(1)
    state = {fqn: tensor.clone() for fqn, tensor in twin.model.state_dict().items()}
    parts = twin.batch.microbatches(4)
    expected = torch.stack([twin.loss(twin.model(*part.args), part.target) for part in parts])
    assert all(torch.equal(losses, expected) for losses in run_ranks(load_and_step, 2, state))


def round_trip(rank: int) -> bool:
    case, other = CASES["tied"](), CASES["tied"]()
    pipe = compiled(case, split=CUTS[2], **OPTIONS)
    step(pipe, case.batch)
    torch.optim.SGD(pipe.parameters(), lr=0.5).step()
    saved = {fqn: tensor.clone() for fqn, tensor in pipe.state_dict().items()}
    again = compiled(other, split=CUTS[2], example=example(other.batch, 4), **OPTIONS)
    again.load_state_dict(saved)
    losses = [each.eval(*case.batch.args, target=case.batch.target).losses for each in (pipe, again)]
    return torch.equal(*losses)


def test_a_ranks_own_part_is_loaded_again() -> None:
    assert run_ranks(round_trip, 2) == [True, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("head.weight"), "missing: head.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "unknown to the model: extra"),
        (
            lambda state: state.update({"head.bias": torch.zeros(3)}),
            r"of another shape: head.bias \[3\] instead of \[10\]",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(change: Any, words: str) -> None:
    case = CASES["plain"]()
    pipe = compiled(case, example=example(case.batch, 4), **OPTIONS)
    before = {fqn: tensor.clone() for fqn, tensor in case.model.state_dict().items()}
    state = {fqn: tensor + 1 for fqn, tensor in before.items()}
    change(state)
    with pytest.raises(graphpp.GraphPPError, match=words):
        pipe.load_state_dict(state)
    assert all(torch.equal(tensor, before[fqn]) for fqn, tensor in case.model.state_dict().items())


def test_not_strict_takes_what_is_there() -> None:
    case = CASES["plain"]()
    pipe = compiled(case, example=example(case.batch, 4), **OPTIONS)
    pipe.load_state_dict({"head.bias": torch.ones(10), "extra": torch.zeros(1)}, strict=False)
    assert torch.equal(case.model.head.bias, torch.ones(10))


def test_nothing_is_known_before_the_first_capture() -> None:
    pipe = compiled(CASES["plain"](), **OPTIONS)
    assert "nothing captured yet" in repr(pipe)
    for ask in (pipe.parameters, pipe.named_parameters, pipe.named_buffers, pipe.state_dict):
        with pytest.raises(graphpp.GraphPPError, match=r"give example= to graphpp.compile, or run a step first"):
            ask()


def meta_pipeline(name: str = "llama") -> tuple[Any, graphpp.Pipeline]:
    case = CASES[name]()
    case.model.to("meta")
    return case, compiled(case, split=split(name), example=example(case.batch, 4), **OPTIONS)


def test_a_meta_model_is_captured_cut_and_printed_without_memory() -> None:
    case, pipe = meta_pipeline()
    assert all(parameter.is_meta for parameter in case.model.parameters())
    assert "layers.2 .. layers.3, norm, output" in str(pipe)
    assert len(list(pipe.parameters())) == len(list(case.model.parameters()))


def test_a_meta_model_does_not_run_and_says_what_to_do() -> None:
    case, pipe = meta_pipeline()
    for run in (lambda: step(pipe, case.batch), lambda: pipe.eval(*case.batch.args)):
        with pytest.raises(graphpp.GraphPPError, match=r"on the meta device, '.*' for one.*pipe.materialize"):
            run()
    with pytest.raises(graphpp.GraphPPError, match=r"pipe\.materialize"):
        pipe.load_state_dict(CASES["llama"]().model.state_dict())
    assert all(parameter.is_meta and parameter.grad is None for parameter in case.model.parameters())
    assert case.model.training


def fill_and_step(rank: int) -> tuple[Tensor, list[bool]]:
    """Only this rank's stages are given memory; values come from a whole model."""
    case, pipe = meta_pipeline()
    full = CASES["llama"]().model
    for fqn in [fqn for fqn, _ in [*pipe.named_parameters(), *pipe.named_buffers()]]:
        prefix, _, attribute = fqn.rpartition(".")
        found = getattr(full.get_submodule(prefix), attribute)
        setattr(case.model.get_submodule(prefix), attribute, found if attribute in COMPUTED else empty(found))
    pipe.load_state_dict(full.state_dict())
    return step(pipe, case.batch).losses, [parameter.is_meta for parameter in case.model.parameters()]


COMPUTED = ("inverse_frequencies",)  # a buffer that no state dict holds


def empty(parameter: Tensor) -> Tensor:
    return torch.nn.Parameter(torch.full_like(parameter, torch.nan))


@pytest.mark.exhaustive
def test_each_rank_needs_memory_for_its_own_stages_only() -> None:
    case = CASES["llama"]()
    expected = compiled(case, microbatches=4)
    losses = step(expected, case.batch).losses
    for found, empty in run_ranks(fill_and_step, 2):
        assert torch.equal(found, losses)
        assert any(empty) and not all(empty)


def meta_on_one_rank(rank: int) -> str:
    case = CASES["plain"]()
    if rank == 1:
        case.model.to("meta")
    pipe = compiled(case, split=CUTS[2], **OPTIONS)
    with pytest.raises(graphpp.GraphPPError) as caught:
        step(pipe, case.batch)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_every_rank_hears_that_one_has_no_memory() -> None:
    first, second = run_ranks(meta_on_one_rank, 2)
    assert first.startswith("MismatchError") and "rank 1: GraphPPError" in first
    assert second.startswith("GraphPPError") and "pipe.materialize" in second
