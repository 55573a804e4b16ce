"""A model on the meta device gets memory and values, the same for every split, and nothing is left without a value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpp
from graphpp.errors import GraphPPError, MismatchError
from tests.distributed import run_ranks
from tests.exhaustive import cases
from tests.ownership.models import Angles, Model, X, compiled, init, on_meta, values, whole

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "two ranks": (2, {"split": 2}),
    "loops": (2, {"split": ["blocks.1", "blocks.2", "blocks.3"], "schedule": "Interleaved1F1B"}),
    "V": (2, {"split": ["blocks.1", "blocks.2", "blocks.3"], "schedule": "ZBVZeroBubble"}),
    "inside a block": (2, {"split": ["blocks.1.up"]}),
    "four ranks": (4, {"split": 4}),
}
Part = tuple[dict[str, Tensor], Tensor, Tensor]


def initialised(rank: int, options: dict[str, Any], seed: int | None) -> Part:
    torch.set_num_threads(1)
    pipe = compiled(on_meta(), **options)
    torch.manual_seed(5)
    pipe.materialize(init, seed=seed)
    state = torch.get_rng_state()
    found = values(pipe)
    return found, state, pipe.step(X, target=X).loss


def parts(layout: str, seed: int | None) -> list[Part]:
    ranks, options = LAYOUTS[layout]
    return run_ranks(initialised, ranks, options, seed) if ranks > 1 else [initialised(0, options, seed)]


@pytest.mark.parametrize("layout", cases(LAYOUTS, "V", "inside a block"))
def test_values_are_those_of_one_process(layout: str) -> None:
    model = whole()
    state = torch.get_rng_state()
    expected = {key: value.detach().clone() for key, value in [*model.state_dict().items(), *model.named_buffers()]}
    losses = torch.stack([_loss(model, row) for row in X.split(1)])
    found: dict[str, Tensor] = {}
    for part, after, loss in parts(layout, None):
        assert torch.equal(after, state)
        assert all(torch.equal(value, expected[key]) for key, value in part.items())
        assert torch.equal(loss, losses.mean())
        found |= part
    assert expected.keys() == found.keys()


def _loss(model: nn.Module, row: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(row).flatten(0, 1), row.flatten()).detach()


@pytest.mark.exhaustive
def test_a_seed_gives_each_module_values_of_its_own() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(5)
    expected, state = {name: parts(name, 7) for name in LAYOUTS}, torch.get_rng_state()
    first = {key: value for part in expected["one rank"] for key, value in part[0].items()}
    for name, found in expected.items():
        whole = {key: value for part in found for key, value in part[0].items()}
        assert all(torch.equal(part[1], state) for part in found), name  # the generators are as before
        assert whole.keys() == first.keys(), name
        assert all(torch.equal(value, first[key]) for key, value in whole.items()), name
    other = {key: value for part in parts("one rank", 8) for key, value in part[0].items()}
    assert not torch.equal(other["blocks.0.up.weight"], first["blocks.0.up.weight"])
    assert not torch.equal(first["blocks.1.up.weight"], first["blocks.0.up.weight"])
    torch.set_rng_state(before)


def test_the_default_is_the_modules_own_code() -> None:
    pipe = compiled(on_meta())
    torch.manual_seed(5)
    pipe.materialize()
    torch.manual_seed(3)
    model = Model()
    torch.manual_seed(5)
    names = ("reset_parameters", "_reset_parameters")
    model.apply(lambda module: [getattr(module, name)() for name in names if hasattr(module, name)])
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in pipe.state_dict().items())


def by_one_function(rank: int) -> dict[str, Tensor]:
    model = on_meta()
    pipe = compiled(model, split=2)
    torch.manual_seed(5)
    pipe.materialize(lambda module: module.apply(init) if module is model else None)
    return values(pipe)


def test_one_function_for_the_whole_model_on_two_ranks() -> None:
    expected = dict(whole().state_dict())
    for part in run_ranks(by_one_function, 2):
        assert all(torch.equal(value, expected[key]) for key, value in part.items() if key in expected)


def kept(rank: int) -> None:
    model = on_meta()
    model.blocks[1].up.requires_grad_(False)
    model.blocks[0].norm.weight.no_decay = True  # type: ignore[assignment]
    pipe = compiled(model, split=2)
    before = dict(model.named_parameters())
    pipe.materialize(init)
    for fqn, parameter in pipe.named_parameters():
        assert not parameter.is_meta and type(parameter) is nn.Parameter
        assert parameter.requires_grad == before[fqn].requires_grad
        assert vars(parameter) == vars(before[fqn])
    assert model.head.weight is model.embedding.weight
    own = dict(pipe.named_parameters())
    assert {name for name, tensor in model.named_parameters() if not tensor.is_meta} == own.keys()
    with pytest.raises(GraphPPError, match="has no values on this rank: rank"):
        model(X)
    pipe.gather(rank=0)
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(X, target=X)
    optimizer.step()


def test_parameters_keep_what_they_had() -> None:
    run_ranks(kept, 2)


def without_angles(module: nn.Module) -> None:
    if not isinstance(module, Angles):
        init(module)


def reads_another(module: nn.Module) -> None:
    init(module)
    if isinstance(module, Model):
        with torch.no_grad():
            module.blocks[3].up.weight.copy_(module.blocks[0].up.weight)


def fails(module: nn.Module) -> None:
    init(module)
    if isinstance(module, nn.BatchNorm1d):
        raise ValueError("no such width")


def half(module: nn.Module) -> None:
    init(module)
    if isinstance(module, nn.BatchNorm1d):
        module.running_mean = torch.full((5,), torch.nan)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a buffer that nothing writes": (without_angles, r"1 tensors have no values, or NaN: angles.angles of a Angles\. Give"),
    "an error": (fails, r"init of norm \(a BatchNorm1d\).* raised ValueError: no such width\n.*test_materialize.py"),
    "nothing": (lambda module: None, "tensors have no values, or NaN"),
    "NaN": (half, "1 tensors have no values, or NaN: norm.running_mean of a BatchNorm1d"),
}


def refused(rank: int, name: str, ranks: int) -> list[str]:
    made, (code, _) = on_meta(), REFUSED[name]
    return _refused(made, code, split=ranks)


def _refused(made: nn.Module, code: Callable[[nn.Module], Any], **options: Any) -> list[str]:
    pipe = compiled(made, **options)
    before = {name: id(tensor) for name, tensor in [*made.named_parameters(), *made.named_buffers()]}
    with pytest.raises(GraphPPError) as error:
        pipe.materialize(code)
    assert before == {name: id(tensor) for name, tensor in [*made.named_parameters(), *made.named_buffers()]}
    torch.manual_seed(5)
    pipe.materialize(init)
    pipe.step(X, target=X)
    return [type(error.value).__name__, str(error.value)]


@pytest.mark.parametrize("name", cases(REFUSED, "NaN", "nothing"))
def test_a_tensor_without_a_value_is_named_and_nothing_changed(name: str) -> None:
    words = REFUSED[name][1]
    assert re.search(words, refused(0, name, 1)[1])
    found = run_ranks(refused, 2, name, 2)
    assert any(re.search(words, text) for _, text in found)
    assert all(kind in ("GraphPPError", "MismatchError") for kind, _ in found)


def crossing(rank: int) -> list[str]:
    return _refused(on_meta(), reads_another, split=["blocks.2"])


def test_a_value_from_a_tensor_of_another_rank_is_refused() -> None:
    text = run_ranks(crossing, 2)[1][1]
    assert "takes values from blocks.0.up.weight, which another rank holds" in text


def test_recurrent_modules_use_the_new_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LSTM(4, 4, batch_first=True))
    x = torch.ones(2, 3, 4)
    pipe = graphpp.compile(model, lambda output: output[0].sum(), example=graphpp.Microbatch((x[:1],)), microbatches=2)
    pipe.materialize()
    assert all(one is other for one, other in zip(model[0]._flat_weights, model[0].parameters(), strict=True))
    for x in (torch.ones(2, 3, 4), torch.ones(2, 5, 4)):
        torch.testing.assert_close(pipe.step(x).loss, model(x)[0].sum().detach() / 2)


def test_tensors_that_share_memory_are_refused() -> None:
    with torch.device("meta"):
        model = Model()
        model.norm.register_buffer("part", model.norm.running_mean[:2])
    with pytest.raises(GraphPPError, match=r"norm\.running_mean and norm\.part share memory"):
        compiled(model).materialize(init)


def test_a_parameter_of_another_dtype_is_refused() -> None:
    def doubled(module: nn.Module) -> None:
        init(module)
        if isinstance(module, nn.LayerNorm):
            module.weight = nn.Parameter(module.weight.double())

    pipe = compiled(on_meta())
    words = r"init has put a Parameter of \[16\] torch\.float64 in the place of blocks\.0\.norm\.weight"
    with pytest.raises(GraphPPError, match=words):
        pipe.materialize(doubled)


def unlike(rank: int, how: str) -> str:
    pipe = compiled(on_meta(), split=2)
    torch.manual_seed(rank if how == "random state" else 0)
    with pytest.raises(MismatchError) as error:
        if how == "one rank" and rank == 1:
            pipe.zero_grad()
            pipe.step(X, target=X)
        else:
            pipe.materialize(init, seed=rank if how == "seed" else None)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "words"), [("random state", "torch.manual_seed on every rank"), ("seed", "seed=1"), ("one rank", "materialize")]
)
def test_ranks_that_differ_hear_of_it(how: str, words: str) -> None:
    for text in run_ranks(unlike, 2, how):
        assert words in text


def test_an_optimizer_of_before_is_told() -> None:
    model = on_meta()
    pipe = compiled(model)
    before = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.materialize(init)
    pipe.step(X, target=X)
    with pytest.raises(GraphPPError, match=r"no longer the model's, .* Make the optimizer of pipe.parameters\(\) after"):
        before.step()


def test_hooks_of_before_are_refused() -> None:
    model = on_meta()
    pipe = compiled(model)
    model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(GraphPPError, match=r"norm\.weight has a gradient hook"):
        pipe.materialize(init)


def test_a_model_with_values_keeps_those_that_no_code_writes() -> None:
    model = whole()
    model.blocks[1].to(device="meta")
    within = set(model.blocks[1].modules())
    pipe = compiled(model)
    pipe.materialize(lambda module: init(module) if module in within else None)
    expected = whole().state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in pipe.state_dict().items() if not k.startswith("blocks.1"))
    pipe.step(X, target=X)


def test_a_pipeline_that_has_captured_nothing_says_so() -> None:
    with pytest.raises(GraphPPError, match=r"give example= to graphpp\.compile"):
        graphpp.compile(on_meta(), nn.functional.cross_entropy).materialize(init)


def anonymous() -> int:
    """Bytes of this process's memory that are no mapped files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


class Wide(nn.Module):
    """Layers of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def peak(rank: int) -> tuple[int, int]:
    with torch.device("meta"):
        model = Wide()
        x = torch.empty(1, 1024)
    example = graphpp.Microbatch((x,), target=x)
    pipe = graphpp.compile(model, nn.functional.mse_loss, example=example, split=4, microbatches=4)
    before = anonymous()
    found = [before]

    def seen(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            found.append(anonymous())

    pipe.materialize(seen)
    found.append(anonymous())
    return max(found) - before, sum(each.nbytes for each in pipe.parameters())


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of a process")
def test_a_rank_takes_memory_for_its_own_part() -> None:
    """Beyond its own part, a rank needs memory for the code that runs: trunc_normal_ makes four tensors like its argument."""
    for most, own in run_ranks(peak, 4):
        assert own == 6 * 4 * 2**20
        assert most < 1.1 * own + 5 * 4 * 2**20
