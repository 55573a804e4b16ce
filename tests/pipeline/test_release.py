"""A rank gives back the memory of the parts that other ranks hold: training goes on, and every misuse says what to call."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import graphpp
from graphpp.capture.watch.conditions import Watch
from graphpp.errors import GraphPPError
from graphpp.runtime.model_state import ModelState
from tests.distributed import run_ranks


class Model(nn.Module):
    """A tied embedding, running statistics, a frozen layer, a scalar, a bool buffer, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.arange(8) % 3 > 0)
        self.register_buffer("table", torch.ones(8, dtype=torch.complex64), persistent=False)
        self.unread = nn.Parameter(torch.ones(3))
        self.layers[2].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for at, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if at == 1:
                x = x * self.mask * self.scale
        return self.head(self.norm(x) * self.table.real)


TOKENS, TARGETS = torch.arange(8) % 12, (torch.arange(8) + 3) % 12
CUT = {"split": ["layers.1", "layers.2", "norm"], "schedule": "Interleaved1F1B", "microbatches": 4}


def compiled(model: nn.Module, **options: Any) -> graphpp.Pipeline:
    example = graphpp.Microbatch((TOKENS[:2],), target=TARGETS[:2])
    return graphpp.compile(model, F.cross_entropy, example=example, **{**CUT, **options})


def model() -> Model:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return Model()


KEPT = graphpp.Memory(release=False)


def train(pipe: graphpp.Pipeline, steps: int = 3) -> list[float]:
    optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=1e-2), []
    for _ in range(steps):
        losses.append(pipe.step(TOKENS, target=TARGETS).loss.item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
    return losses


def trains(rank: int, release: bool) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
    pipe = compiled(model(), memory=KEPT)
    given_back = pipe.release() if release else 0
    losses = train(pipe)
    pipe.eval(TOKENS, target=TARGETS)
    losses += train(pipe, 1)
    gathered = pipe.gather(rank=1)
    return losses, {key: value.clone() for key, value in pipe.state_dict().items()}, gathered, given_back


def test_training_is_the_same_and_the_whole_can_be_gathered() -> None:
    kept, released = run_ranks(trains, 4, False), run_ranks(trains, 4, True)
    whole: dict[str, Tensor] = {}
    for before, after in zip(kept, released, strict=True):
        assert before[0] == after[0]
        assert before[1].keys() == after[1].keys()
        assert all(torch.equal(value, after[1][key]) for key, value in before[1].items())
        assert after[3] > 0
        whole |= after[1]
    for rank, (_, _, gathered, _) in enumerate(released):
        if rank != 1:
            assert gathered == {}
            continue
        assert set(gathered) == set(Model().state_dict())
        assert all(torch.equal(gathered[key], value) for key, value in whole.items())
        assert torch.equal(gathered["unread"], torch.ones(3))
        assert gathered["head.weight"] is gathered["embedding.weight"]


MISUSES: dict[str, Callable[[nn.Module], Any]] = {
    "model(x)": lambda m: m(TOKENS),
    "state_dict": lambda m: m.state_dict(),
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "get_model_state_dict": get_model_state_dict,
    "deepcopy": copy.deepcopy,
    "clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "grad": lambda m: [p.grad for p in m.parameters()],
    "to a parameter": lambda m: [TOKENS.to(p) for p in m.parameters()],
    "optimizer": lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1).step(),
    "norm": lambda m: sum(float(p.detach().norm()) for p in m.parameters()),
    "data": lambda m: [p.data for p in m.parameters()],
    "init": lambda m: [nn.init.zeros_(p) for p in m.parameters()],
}


def misused(rank: int) -> dict[str, str]:
    made = model()
    before = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)
    pipe = compiled(made)
    pipe.step(TOKENS, target=TARGETS)
    found = {}
    for name, misuse in {**MISUSES, "optimizer of before": lambda _: before.step()}.items():
        try:
            misuse(made)
        except GraphPPError as error:
            found[name] = str(error)
    return found


def test_every_misuse_says_what_to_call() -> None:
    for found in run_ranks(misused, 2):
        for name in MISUSES:
            assert "has no values on this rank: rank" in found[name], name
            assert "pipe.parameters()" in found[name]
        assert "Make the optimizer of pipe.parameters() after" in found["optimizer of before"]


def still_usable(rank: int) -> list[float]:
    made = model()
    pipe = compiled(made)
    assert pipe.release() == 0
    losses = train(pipe, 1)
    made.layers.requires_grad_(False)  # a frozen part is frozen on all ranks
    losses += train(pipe, 1)
    made.train(False)
    losses += train(pipe, 1)
    profile = pipe.profile(TOKENS, target=TARGETS, repeat=1)
    assert profile.costs.stages
    losses.append(pipe.step(torch.cat([TOKENS, TOKENS]), target=torch.cat([TARGETS, TARGETS])).loss.item())  # another capture
    assert all(not p.is_meta for p in pipe.parameters())
    others = dict(made.named_parameters()).keys() - dict(pipe.named_parameters()).keys() - {"unread"}
    assert others
    assert all(dict(made.named_parameters())[name].is_meta for name in others)
    assert "which rank" in str(dict(made.named_parameters())[min(others)])
    return losses


def test_a_released_model_is_frozen_evaluated_profiled_and_captured_again() -> None:
    one, other = run_ranks(still_usable, 2)
    assert one == other


def test_a_released_recurrent_module_looks_as_before() -> None:
    """Otherwise the ranks would disagree in the next step on whether the model has changed."""
    net = nn.Sequential(nn.GRU(4, 4), nn.Linear(4, 4))
    watch = Watch(net, None)
    before = watch.look().conditions
    ModelState(net).release({f"0.{name}": 1 for name, _ in net[0].named_parameters()})
    assert watch.look().conditions.changed(before) == []
    assert not net[0]._weights_have_changed()  # type: ignore[operator]


def in_a_trainer(rank: int) -> list[float]:
    """Losses and norms of steps between which a trainer treats the model as one process has it."""
    made, found = model(), list[float]()
    pipe = compiled(made)
    for convert, dtype in (("float", torch.float32), ("double", torch.float64)):
        assert made.to("cpu") is made is made.cpu().train() and made.to(memory_format=torch.channels_last) is made
        getattr(made, convert)()
        assert {p.dtype for p in made.parameters()} == {dtype}
        made.zero_grad()
        assert all(p.grad is None for p in pipe.parameters())
        found.append(pipe.step(TOKENS, target=TARGETS).loss.item())
        made.zero_grad(set_to_none=False)
        assert all(p.grad is None or not p.grad.any() for p in pipe.parameters())
        pipe.step(TOKENS, target=TARGETS)
        found.append(pipe.clip_grad_norm_(1.0).item())
        assert not hasattr(pipe, "module")
    return found


def test_a_trainer_may_move_convert_and_zero_the_model() -> None:
    assert run_ranks(in_a_trainer, 2) == [in_a_trainer(0)] * 2


def second_pipeline(rank: int) -> str:
    made = model()
    first = compiled(made)
    assert first.release() == 0
    try:
        second = compiled(made, split=["layers.3"])
        second.step(TOKENS, target=TARGETS)
    except GraphPPError as error:
        return str(error)
    return "no error"


def test_a_second_pipeline_that_needs_a_released_parameter_is_told() -> None:
    for text in run_ranks(second_pipeline, 2):
        assert "has given their memory back. Choose split=" in text


def anonymous_bytes() -> int:
    """The anonymous memory of this process: pages of files do not count."""
    with open(f"/proc/{os.getpid()}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def memory_given_back(rank: int) -> tuple[int, int]:
    torch.set_num_threads(1)
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))  # 16 MiB each
    x = torch.ones(4, 2048)
    example = graphpp.Microbatch((x[:2],), target=x[:2])
    options = {"split": ["4"], "schedule": "1F1B", "microbatches": 2, "memory": KEPT}
    pipe = graphpp.compile(layers, F.mse_loss, example=example, **options)
    before = anonymous_bytes()
    claimed = pipe.release()
    return claimed, before - anonymous_bytes()


def test_the_memory_goes_back_to_the_machine() -> None:
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc")
    for claimed, measured in run_ranks(memory_given_back, 2):
        assert claimed == 4 * 2**24
        assert measured > 0.9 * claimed


def asks_wrongly(rank: int, how: dict[str, Any]) -> str:
    pipe = compiled(model())
    try:
        pipe.gather(**how)
    except GraphPPError as error:
        return str(error)
    return "no error"


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"names": ["scale", "nothing"]}, "the model's state dict has no entry 'nothing'"),
        ({"rank": 2}, "rank: the pipeline has ranks 0..1, got 2"),
        ({"rank": -1}, "rank: take"),
    ],
)
def test_gather_refuses(how: dict[str, Any], said: str) -> None:
    for text in run_ranks(asks_wrongly, 2, how):
        assert said in text


def gathers_everywhere(rank: int) -> dict[str, Tensor]:
    return compiled(model()).gather(["norm.running_mean", "scale", "mask"], rank=None)


def test_every_rank_may_gather_some_entries() -> None:
    expected = model().state_dict()
    for found in run_ranks(gathers_everywhere, 4):
        assert list(found) == [key for key in expected if key in ("norm.running_mean", "scale", "mask")]
        assert all(torch.equal(found[key], expected[key]) for key in found)
