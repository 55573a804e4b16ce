"""`pipe.as_module()`: loops that call forward, zero_grad, backward and step apart, against the same loop over the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import graphpp
from graphpp.pipeline.interfaces.as_module import ModuleOutput
from tests.distributed import run_ranks

X = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))  # four batches
Y = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))
PARTS = 2


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.config = {"width": 8}
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.norm(self.first(x))))
        return {"logits": logits} if labels is None else {"logits": logits, "loss": F.mse_loss(logits, labels)}


class Eager(nn.Module):
    """The model over microbatches, with the mean of their losses."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> ModuleOutput:
        if not self.training:
            outputs = [self.model(a, b) for a, b in zip(x.chunk(PARTS), labels.chunk(PARTS), strict=True)]
            loss = torch.stack([output["loss"] for output in outputs]).mean()
            return ModuleOutput(loss=loss, logits=torch.cat([output["logits"] for output in outputs]))
        losses = [self.model(a, b)["loss"] for a, b in zip(x.chunk(PARTS), labels.chunk(PARTS), strict=True)]
        return ModuleOutput(loss=torch.stack(losses).mean())


def read_loss(output: dict[str, Tensor]) -> Tensor:
    return output["loss"]


def piped(tied: bool = True, **options: Any) -> tuple[Model, nn.Module, graphpp.Pipeline]:
    model = Model(tied)
    example = graphpp.Microbatch((), {"x": X[0][: 8 // PARTS], "labels": Y[0][: 8 // PARTS]})
    pipe = graphpp.compile(model, read_loss, example=example, microbatches=PARTS, **{"split": ["last"], **options})
    return model, pipe.as_module(), pipe


def plain(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for x, labels in zip(X, Y, strict=True):
        loss = module(x=x, labels=labels).loss
        optimizer.zero_grad()  # between the forward and the backward
        loss.backward()
        optimizer.step()
        yield loss.detach()


def accumulating(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Two batches to a step of the optimizer, whose gradients stay in place as zeros."""
    for at, (x, labels) in enumerate(zip(X, Y, strict=True)):
        loss = module(x=x, labels=labels).loss / 2
        loss.backward()
        if at % 2:
            optimizer.step()
            module.zero_grad(set_to_none=False)
        yield loss.detach()


def both_then_backward(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for first, second in ((0, 1), (2, 3)):
        loss = module(x=X[first], labels=Y[first]).loss + 3 * module(x=X[second], labels=Y[second]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def interrupted(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Forwards without a backward: an exception between the two calls, `no_grad`, and evaluations."""
    for x, labels in zip(X, Y, strict=True):
        module(x=x, labels=labels)
        with torch.no_grad():
            yield module(x=x, labels=labels).loss
        module.eval()
        with torch.no_grad():
            yield module(x=x, labels=labels).loss
        module.train()
        loss = module(x=x, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def scaled(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    for at, (x, labels) in enumerate(zip(X, Y, strict=True)):
        loss = module(x=x, labels=labels * (1e36 if at == 2 else 1)).loss  # the gradients of batch 2 overflow
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield torch.tensor([loss.item() if at != 2 else 0, scaler.get_scale()])


LOOPS = [plain, accumulating, both_then_backward, interrupted, scaled]
Loop = Callable[[nn.Module, torch.optim.Optimizer], Iterator[Tensor]]


def train(module: nn.Module, loop: Loop) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The values of the loop, and this rank's parameters and buffers at the end, by FQN."""
    values = list(loop(module, torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)))
    return values, {key: value.clone() for key, value in module.state_dict().items()}


def in_eager(loop: Loop, tied: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    values, state = train(Eager(Model(tied)), loop)
    return values, {key.removeprefix("model."): value for key, value in state.items()}


def check(found: tuple[list[Tensor], dict[str, Tensor]], loop: Loop, tied: bool, exact: bool) -> None:
    values, state = in_eager(loop, tied)
    assert found[1].keys() <= state.keys() and found[1]
    pairs = [*zip(found[0], values, strict=True), *((found[1][key], state[key]) for key in found[1])]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_is_that_of_the_model(loop: Loop) -> None:
    """Bit-equal where each step's gradients go into an empty `param.grad`."""
    check(train(piped(tied=False)[1], loop), loop, tied=False, exact=loop in (plain, interrupted))


def on_rank(rank: int) -> list[Any]:
    torch.set_num_threads(1)
    found = []
    for loop in LOOPS:
        _, module, pipe = piped()
        with pytest.raises(graphpp.GraphPPError, match="dp_replicate in the mesh="):
            DistributedDataParallel(module)
        found.append((train(module, loop), dict(module.named_parameters()).keys() == dict(pipe.named_parameters()).keys()))
    return found


def test_two_ranks() -> None:
    for found in run_ranks(on_rank, 2):
        for loop, (values, same_names) in zip(LOOPS, found, strict=True):
            check(values, loop, tied=True, exact=False)
            assert same_names


def test_nothing_is_copied_where_no_gradient_is_in_place() -> None:
    _, module, _ = piped()
    first = module(x=X[0], labels=Y[0]).loss
    assert all(parameter.grad is None for parameter in module.parameters())
    with patch.object(Tensor, "add_", side_effect=AssertionError), patch.object(Tensor, "clone", side_effect=AssertionError):
        first.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_hooks_of_gradients_run_in_the_backward() -> None:
    model, module, _ = piped()
    called: list[str] = []
    model.first.bias.register_post_accumulate_grad_hook(lambda parameter: called.append("bias"))
    loss = module(x=X[0], labels=Y[0]).loss
    assert not called
    loss.backward()
    assert called == ["bias"]


def test_a_module_is_touched_as_trainers_touch_models() -> None:
    model, module, pipe = piped()
    assert module.to("cpu") is module and module.cpu() is module and module.float() is module
    assert module.config is model.config and not hasattr(module, "module")
    assert not module.eval().training and not model.norm.training
    assert module.train().training and model.norm.training
    assert module.state_dict().keys() == pipe.state_dict().keys() == nn.ModuleDict({"a": module}).a.state_dict().keys()
    module.load_state_dict({key: torch.zeros_like(value) for key, value in module.state_dict().items()})
    assert not any(parameter.any() for parameter in model.parameters())
    module.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    outer = nn.Sequential(module)
    assert {id(parameter) for parameter in outer.parameters()} == {id(parameter) for parameter in pipe.parameters()}


def test_a_factor_that_is_not_finite_spoils_no_later_step() -> None:
    _, module, _ = piped()
    (module(x=X[0], labels=Y[0]).loss * torch.inf).backward()
    module.zero_grad()
    module(x=X[0], labels=Y[0]).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())  # type: ignore[union-attr]


def test_parts_of_the_module_are_those_of_the_model() -> None:
    """Flags of one layer act, and classes are seen by rules of weight decay."""
    model, module, pipe = piped(split=["norm"])
    module.norm.eval()  # type: ignore[operator]
    assert not model.norm.training and isinstance(module.norm, nn.BatchNorm1d) and module.norm.num_features == 8
    before = model.norm.running_mean.clone()
    module(x=X[0], labels=Y[0])
    assert torch.equal(model.norm.running_mean, before)
    assert "norm" in [name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm1d)]
    assert pipe.is_first and pipe.is_last


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named, self.listed = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.named.values(), *self.listed):
            x = torch.tanh(layer(x))
        return x


def containers(rank: int) -> list[list[Tensor]]:
    example = graphpp.Microbatch((X[0],), target=Y[0])
    pipe = graphpp.compile(Containers(), F.mse_loss, split=["named.b"], schedule="1F1B", microbatches=2, example=example)
    module: Any = pipe.as_module()
    layers = [*module.named.values(), *(module.listed if rank else ())]
    assert list(module.named) == list("ab"[rank]) and len(module.named) == 1
    assert isinstance(module.named, nn.ModuleDict) and list(module.named.items()) == [("ab"[rank], module.named["ab"[rank]])]
    assert [id(layer.weight) for layer in layers] == [id(each) for each in pipe.parameters() if each.dim() == 2]
    assert module.listed[0].weight.shape == module.listed[-1:][0].weight.shape == module.named["b"].weight.shape == (8, 8)
    module.named["a"].requires_grad_(False)  # of the first rank
    batch, target = X[:2].flatten(0, 1), Y[:2].flatten(0, 1)
    module(batch, target=target).loss.backward()
    assert [layer.weight.grad is None for layer in layers] == [not rank] * len(layers)
    module.requires_grad_(True)
    module(batch, target=target).loss.backward()
    assert all(layer.weight.grad is not None for layer in layers)
    return [[layer.weight.detach() for layer in layers]]


def test_containers_have_the_modules_of_the_rank() -> None:
    """torchtitan's load balancing of experts goes over the layers of a part; loops freeze layers by their index."""
    assert [len(found[0]) for found in run_ranks(containers, 2)] == [1, 2]


def replace_weight(module: nn.Module) -> None:
    module.norm.weight = nn.Parameter(torch.zeros(8))  # type: ignore[union-attr]
    module(x=X[0], labels=Y[0])


def test_a_module_around_it_has_all_names_of_a_tied_parameter() -> None:
    model, module, _ = piped()
    outer = nn.ModuleDict({"net": module})
    assert {key.removeprefix("net.") for key in outer.state_dict()} == model.state_dict().keys()
    outer.load_state_dict({key: torch.ones_like(value) for key, value in outer.state_dict().items()})
    assert model.last.weight.eq(1).all() and len([*outer.parameters()]) == len([*model.parameters()])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.line(x)


def test_loss_kwargs_reach_the_loss() -> None:
    def loss(output: Tensor, target: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.mse_loss(output, target) * scale

    example = graphpp.Microbatch((X[0],), target=Y[0])
    pipe = graphpp.compile(Scaled(), loss, example=example, microbatches=1)
    module = pipe.as_module()
    expected = [pipe.eval(X[0], target=Y[0], loss_kwargs={"scale": scale}).loss for scale in (2.0, 3.0)]
    assert [module(X[0], target=Y[0], loss_kwargs={"scale": scale}).loss.detach() for scale in (2.0, 3.0)] == expected


@dataclasses.dataclass
class Named:
    logits: Tensor
    more: Tensor | None = None


torch.export.register_dataclass(Named)


class Pair(NamedTuple):
    logits: Tensor
    more: Any = None


class Returns(nn.Linear):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__(8, 8)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(super().forward(x))


@pytest.mark.parametrize("kind", [Named, Pair, lambda logits: {"logits": logits, "more": None}])
def test_the_fields_of_an_output_are_those_of_the_result(kind: Callable[[Tensor], Any]) -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output["logits"] if isinstance(output, dict) else output.logits, target)

    pipe = graphpp.compile(Returns(kind), loss, example=graphpp.Microbatch((X[0],), target=Y[0]), microbatches=1)
    found = pipe.as_module().eval()(X[0], target=Y[0])
    assert torch.equal(F.mse_loss(found.logits, Y[0]), found.loss) and found["more"] is None
    with pytest.raises(KeyError, match="and no 0 on this rank: `output` is the model's own"):
        found[0]


def test_outputs_are_kept_for_batches_of_other_sizes() -> None:
    """A second size is traced for all sizes, whose outputs have bytes too."""
    pipe = graphpp.compile(nn.Linear(8, 8), F.mse_loss, microbatches=1, memory=graphpp.Memory(outputs=True))
    assert [len(pipe.step(X[0][:rows], target=Y[0][:rows]).output) for rows in (8, 6, 4)] == [8, 6, 4]
    lengths = [graphpp.Microbatch((X[:2, :length],), target=Y[:2, :length]) for length in (8, 6)]
    with pytest.raises(graphpp.BatchError, match=r"\(2, 8, 8\) and \(2, 6, 8\) .* cannot be put together. Pad them alike"):
        pipe.step_microbatches(lengths)
    assert [each.shape for each in pipe.step_microbatches(lengths, output="each").output] == [(2, 8, 8), (2, 6, 8)]


def backward_twice(module: nn.Module) -> None:
    loss = module(x=X[0], labels=Y[0]).loss
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda module: module.half(), "cannot move them to cpu in torch.float16: change the model's dtype before"),
        (lambda module: module.to("meta"), "cannot move them to meta"),
        (lambda module: module.load_state_dict(module.state_dict(), assign=True), "assign=True would replace"),
        (lambda module: module.eval()(x=X[0], labels=Y[0]).loss.backward(), "the module was in eval mode"),
        (lambda module: module(x=X[0], labels=Y[0]).loss.backward(create_graph=True), "create_graph=True"),
        (lambda module: module(x=X[0], labels=Y[0]).losses.mean().backward(), "a value of the module's output other than"),
        (replace_weight, "norm.weight was replaced in the pipeline's module"),
        (backward_twice, "a second backward of one loss"),
        (lambda module: graphpp.compile(Model(True), read_loss).as_module(), "nothing is captured yet: give example="),
    ],
)
def test_misuse(misuse: Callable[[nn.Module], object], words: str) -> None:
    with pytest.raises(graphpp.GraphPPError, match=words):
        misuse(piped()[1])
