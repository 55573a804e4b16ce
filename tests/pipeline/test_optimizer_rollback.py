"""A step that is rolled back leaves no trace: every optimizer of torch that steps without a closure, and a rude one."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from graphpp.errors import GraphPPError
from graphpp.pipeline.optimizer_rollback import OptimizerSnapshot

Make = Callable[[Iterable[Any]], optim.Optimizer]


class Rude(optim.Optimizer):
    """Writes into gradients, draws random numbers, exchanges its tensors, and keeps state in odd places."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0, "history": []})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            group["history"].append(group["steps"])
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.1).add_(torch.rand_like(p))
                    state = self.state[p]
                    state["mean"] = p.grad * 0.1 + state.get("mean", 0.0)
                    state.setdefault("last", [None, (p.clone(),)])[0] = p.grad.clone()
                    state["last"][1][0].mul_(0.5)
                    p.add_(state["mean"] * state["last"][1][0], alpha=-group["lr"])
                    self.state["all"][f"seen {len(self.state)}"] = True


class Strange(optim.SGD):
    """Has an object in its state that a snapshot cannot copy."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.state["all"]["what"] = object()


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "SGD dampened": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True, foreach=True),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "SGD nesterov, no decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW loop": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True, foreach=False, maximize=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adagrad": optim.Adagrad,
    "Adamax": optim.Adamax,
    "ASGD": lambda p: optim.ASGD(p, t0=1),
    "Muon": lambda p: optim.Muon([each for each in p if each.dim() == 2]),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "Rude": Rude,
}


def parameters() -> list[nn.Parameter]:
    """Parameters of several dtypes and shapes; the last never has a gradient."""
    torch.manual_seed(0)
    kinds = [
        ((3, 4), torch.float32),
        ((5,), torch.float64),
        ((), torch.float32),
        ((2, 3), torch.bfloat16),
        ((4,), torch.float32),
    ]
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape, dtype in kinds]


def gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params[:-1]:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def bits(value: object) -> Any:
    """A structure with every tensor as its bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [bits(part) for part in value]
    return value


def everything(optimizer: optim.Optimizer, params: list[nn.Parameter]) -> Any:
    """All values that a step may change, as bytes."""
    return bits([params, [p.grad for p in params], optimizer.state_dict(), torch.get_rng_state()])


def trained(make: Make, steps: int) -> tuple[list[nn.Parameter], optim.Optimizer]:
    params = parameters()
    optimizer = make(params)
    for seed in range(steps):
        gradients(params, seed)
        optimizer.step()
    gradients(params, steps)
    return params, optimizer


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_taken_back(name: str, steps: int) -> None:
    params, optimizer = trained(OPTIMIZERS[name], steps)
    before, snapshot = everything(optimizer, params), OptimizerSnapshot([optimizer])
    assert snapshot.take()
    optimizer.step()
    assert everything(optimizer, params) != before
    snapshot.restore()
    assert everything(optimizer, params) == before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_were_taken_back_change_nothing_later(name: str) -> None:
    params, optimizer = trained(OPTIMIZERS[name], 0)
    snapshot = OptimizerSnapshot([optimizer])
    for seed in range(4):
        gradients(params, seed)
        snapshot.take()
        optimizer.step()
        snapshot.restore()
        optimizer.step()
    twins = parameters()
    twin = OPTIMIZERS[name](twins)
    for seed in range(4):
        gradients(twins, seed)
        twin.step()
    assert everything(optimizer, params)[:3] == everything(twin, twins)[:3]


def test_nan_and_signed_zero_come_back() -> None:
    p = nn.Parameter(torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-45]))
    optimizer = optim.SGD([p], lr=1.0)
    p.grad = torch.ones_like(p)
    before, snapshot = bits(p), OptimizerSnapshot([optimizer])
    snapshot.take()
    optimizer.step()
    snapshot.restore()
    assert bits(p) == before


def test_copies_are_used_again() -> None:
    _params, optimizer = trained(OPTIMIZERS["AdamW"], 1)
    snapshot = OptimizerSnapshot([optimizer])
    snapshot.take()
    copies = [copy.data_ptr() for copy in snapshot._copies]
    optimizer.step()
    snapshot.take()
    assert [copy.data_ptr() for copy in snapshot._copies] == copies


def test_copying_ends_when_there_is_no_need() -> None:
    _, optimizer = trained(OPTIMIZERS["AdamW"], 1)
    snapshot, calls = OptimizerSnapshot([optimizer]), iter([False, False, True])
    assert not snapshot.take(lambda: next(calls))
    assert len(snapshot._copies) == 2
    assert not snapshot.take(lambda: True)
    before = bits(optimizer.state_dict())
    optimizer.step()
    after = bits(optimizer.state_dict())
    snapshot.restore()  # there is no snapshot
    assert before != after == bits(optimizer.state_dict())


def test_state_that_cannot_be_copied_is_refused() -> None:
    _, optimizer = trained(lambda p: Strange(p, lr=0.1), 1)
    with pytest.raises(GraphPPError, match=r"state\['all'\]\['what'\] holds a object, and a step"):
        OptimizerSnapshot([optimizer]).check()
    with pytest.raises(GraphPPError, match="cannot be taken back"):
        OptimizerSnapshot([optimizer]).take()
