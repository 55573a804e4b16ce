"""Values that cross boundaries in odd ways, and parameters that several stages share, against eager's numbers.

Each model is one idea; it is cut before `layers.1`, `layers.2` and `layers.3`, in one process.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphpp
from tests.distributed import run_ranks
from tests.models import Batch, Case
from tests.reference import eager_steps, gradients

WIDTH, ROWS, MICROBATCHES = 4, 4, 2
CUTS = ["layers.1", "layers.2", "layers.3"]
Function = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Four layers, a table of as many rows, and a function of them."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(4, WIDTH))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def square(output: Any, target: Tensor) -> Tensor:
    return (first_of(output) - target).pow(2).mean()


def case(function: Function, loss: Callable[[Any, Tensor], Tensor] = square) -> Case:
    torch.manual_seed(0)
    return Case(Model(function), loss, Batch((torch.randn(ROWS, WIDTH),), {}, torch.randn(ROWS, WIDTH)))


def compiled(case: Case, split: list[str] = CUTS) -> graphpp.Pipeline:
    example = graphpp.Microbatch(*case.batch.microbatches(MICROBATCHES)[0])
    options: dict[str, Any] = {"schedule": "GPipe", "microbatches": MICROBATCHES, "example": example}
    return graphpp.compile(case.model, case.loss, split=split, **options)


def check(case: Case, tied: tuple[str, ...] = (), split: list[str] = CUTS) -> graphpp.Pipeline:
    """Losses, gradients (None where eager has none) and buffers are eager's bits; `tied` may differ in the last one."""
    eager = eager_steps(case.model, case.loss, [case.batch], MICROBATCHES, 1, None)
    pipe = compiled(case, split)
    losses = pipe.step(*case.batch.args, target=case.batch.target).losses
    assert torch.equal(losses, eager.losses[0])
    found = gradients(case.model)
    for fqn, gradient in eager.grads[0].items():
        if fqn in tied:
            torch.testing.assert_close(found[fqn], gradient, rtol=1e-6, atol=1e-7)
        else:
            assert (found[fqn] is None) == (gradient is None), fqn
            assert gradient is None or torch.equal(found[fqn], gradient), fqn
    for fqn, buffer in case.model.named_buffers():
        assert torch.equal(buffer, eager.buffers[fqn]), fqn
    return pipe


def sliced(m: Any, x: Tensor) -> Tensor:
    """One table, of which each layer uses its row."""
    for index, layer in enumerate(m.layers):
        x = layer(x).tanh() * m.table[index]
    return x


def swapped_in(m: Any, x: Tensor) -> Tensor:
    """Tied by a functional call: every layer runs with the first one's weight."""
    for layer in m.layers:
        x = torch.func.functional_call(layer, {"weight": m.layers[0].weight}, (x,)).tanh()
    return x


def shared_twice(m: Any, x: Tensor) -> Tensor:
    """One module in three stages."""
    for layer in (m.layers[0], m.layers[1], m.layers[0], m.layers[2], m.layers[0], m.layers[3]):
        x = layer(x).tanh()
    return x


SHARED: list[tuple[Function, tuple[str, ...]]] = [
    (sliced, ("table",)),
    (swapped_in, ("layers.0.weight",)),
    (shared_twice, ("layers.0.weight", "layers.0.bias")),
]


@pytest.mark.parametrize(("function", "tied"), SHARED)
def test_a_parameter_of_several_stages_has_one_gradient(function: Function, tied: tuple[str, ...]) -> None:
    check(case(function), tied)


def trained_on_a_rank(rank: int) -> dict[str, Tensor]:
    """What a rank holds after three steps of a model that calls one module again and again (ALBERT), cut between calls."""
    made = case(lambda m, x: m.layers[0](m.layers[0](m.layers[0](m.layers[0](x).tanh()).tanh()).tanh()))
    split = ["layers.0@1", "layers.0@2", "layers.0@3"]
    options: dict[str, Any] = {"schedule": "Interleaved1F1B", "microbatches": MICROBATCHES}
    pipe = graphpp.compile(made.model, made.loss, split=split, **options)
    for _ in range(3):
        pipe.step(*made.batch.args, target=made.batch.target)
        optimizer = torch.optim.AdamW(pipe.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: value.detach() for fqn, value in pipe.named_parameters() if fqn.startswith("layers.0")}


def test_ranks_that_share_a_module_keep_equal_copies() -> None:
    first, second = run_ranks(trained_on_a_rank, 2)
    assert first.keys() == second.keys() == {"layers.0.weight", "layers.0.bias"}
    assert all(torch.equal(first[fqn], second[fqn]) for fqn in first)
    assert not torch.equal(first["layers.0.bias"], case(plain).model.layers[0].bias)


def plain(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x).tanh()
    return x


def around(value: Callable[[Any, Tensor], Any], use: Callable[[Any, Tensor], Tensor]) -> Function:
    """A value of the first stage that only the last one uses."""

    def function(m: Any, x: Tensor) -> Tensor:
        x = m.layers[0](x)
        kept = value(m, x)
        for layer in m.layers[1:3]:
            x = layer(x).tanh()
        return use(kept, m.layers[3](x))

    return function


CROSSING = {
    "integers": around(lambda m, x: x.argmax(1), lambda kept, x: x * F.one_hot(kept, WIDTH)),
    "booleans": around(lambda m, x: x > 0, lambda kept, x: x.masked_fill(kept, 0.5)),
    "no dimension": around(lambda m, x: x.mean(), lambda kept, x: x * kept),
    "transposed": around(lambda m, x: x.t(), lambda kept, x: x + kept.sum(1)),
    "expanded": around(lambda m, x: x[:, :1].expand(-1, WIDTH), lambda kept, x: x * kept),
    "every second": around(lambda m, x: x[:, ::2], lambda kept, x: x * kept.repeat(1, 2)),
    "halves": around(lambda m, x: x.half(), lambda kept, x: x + kept),
    "doubles": around(lambda m, x: x.double(), lambda kept, x: (x + kept).float()),
    "complex": around(lambda m, x: torch.complex(x, x + 1), lambda kept, x: x * kept.abs()),
    "a tuple and None": around(lambda m, x: {"a": (x, None, 2.0)}, lambda kept, x: x + kept["a"][0] * kept["a"][2]),
    "nothing left": around(lambda m, x: x[:, :0], lambda kept, x: x + kept.sum()),
    "detached": around(lambda m, x: x.detach(), lambda kept, x: x * kept),
}


class Out(NamedTuple):
    """An output with more than the loss reads."""

    logits: Tensor
    aux: list[Tensor]
    note: str
    nothing: None


def encoded(m: Any, x: Tensor) -> Tensor:
    """All stages read the first one's result."""
    encoded = m.layers[0](x)
    for layer in m.layers[1:]:
        x = layer(x).tanh() * encoded
    return x


def every_layer(m: Any, x: Tensor) -> Out:
    aux = []
    for layer in m.layers:
        x = layer(x).tanh()
        aux.append(x.pow(2).mean())
    return Out(x, aux, "kept", None)


def test_a_loss_reads_every_stage() -> None:
    """Router losses, deep supervision."""
    check(case(every_layer, lambda output, target: square(output, target) + 0.1 * torch.stack(output.aux).sum()))


def counted(m: Any, x: Tensor) -> Tensor:
    """Load of the experts, and a running mean by hand, in stage 2."""
    for index, layer in enumerate(m.layers):
        x = layer(x).tanh()
        if index == 2:
            with torch.no_grad():
                m.counts += F.one_hot(x.argmax(1), 4).sum(0)
                m.mean.mul_(0.9).add_(0.1 * x.mean(0))
    return x


def test_a_buffer_read_by_every_stage() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x).tanh() + m.mean * x
        return x

    made = case(function)
    made.model.mean.fill_(0.5)
    check(made)


@pytest.mark.parametrize("frozen", [[0], [0, 1], [1], [3], [1, 2]])
def test_frozen_stages(frozen: list[int]) -> None:
    made = case(plain)
    for index in frozen:
        made.model.layers[index].requires_grad_(False)
    check(made)
    assert all(made.model.layers[index].weight.grad is None for index in frozen)


def test_what_the_loss_does_not_reach_has_no_gradient() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        x = m.layers[1](m.table.detach()[:2] + x)
        unread = m.layers[2](x).detach()
        return m.layers[3](x) + unread

    made = case(function)
    check(made, split=CUTS[1:])
    assert {fqn for fqn, gradient in gradients(made.model).items() if gradient is None} == {
        "table", "layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias",
    }  # fmt: skip


def autocast_inside(m: Any, x: Tensor) -> Tensor:
    x = m.layers[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        x = m.layers[2](m.layers[1](x).tanh())
    return m.layers[3](x.float())


def checkpointed(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = checkpoint(lambda v, layer=layer: layer(v).tanh(), x, use_reentrant=False)
    return x


def masked_attention(m: Any, x: Tensor) -> Tensor:
    query, key, value = (layer(x).view(1, 1, -1, WIDTH) for layer in m.layers[:3])
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
    return m.layers[3](F.scaled_dot_product_attention(query, key, value, attn_mask=mask).view(x.shape))


def rotary(m: Any, x: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2, dtype=torch.float))
    for layer in m.layers:
        x = torch.view_as_real(torch.view_as_complex(layer(x).view(-1, WIDTH // 2, 2)) * angles).flatten(1)
    return x


NAMED = (encoded, counted, autocast_inside, checkpointed, masked_attention, rotary)
FUNCTIONS = CROSSING | {each.__name__: each for each in NAMED}


@pytest.mark.first_cases(9)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_losses_gradients_and_buffers_are_those_of_eager(name: str) -> None:
    check(case(FUNCTIONS[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    made = case(plain)
    made.model.to(dtype)
    check(Case(made.model, made.loss, Batch((made.batch.args[0].to(dtype),), {}, made.batch.target.to(dtype))))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # eager's cond
def test_cond_in_a_stage() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        x = m.layers[1](m.layers[0](x))
        x = torch.cond(x.sum() > 0, lambda v: m.layers[2](v).tanh(), lambda v: m.layers[2](v).sin(), (x,))
        return m.layers[3](x)

    check(case(function), split=["layers.1", "layers.3"])
