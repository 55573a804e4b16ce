"""A model that asks whether it is being traced gets False, unless the branch of eager cannot be traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpp
from graphpp import CaptureError


class Asking(nn.Module):
    """Takes another branch when it is traced. `hard`: the branch of eager reads data, so that it cannot be traced."""

    def __init__(self, hard: bool, harder: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hard, self.harder, self.traces = hard, harder, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            if self.harder:
                assert x.sum() > 0
            return self.second(x).sin()
        if self.hard:
            assert bool(x.isfinite().all())
        return self.second(x).cos()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("hard", [False, True])
def test_the_code_of_eager_is_captured_where_it_can_be(hard: bool) -> None:
    model, x = Asking(hard), torch.randn(4, 4)
    result = graphpp.compile(model, loss, split=["second"], microbatches=2).step(x, target=x)
    output = model(x)
    traced = model.second(model.first(x)).sin()
    expected = loss(traced if hard else output, x)
    torch.testing.assert_close(result.loss, expected.detach())
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def test_what_neither_branch_allows_is_refused() -> None:
    model, x = Asking(True, harder=True), torch.randn(4, 4)
    with pytest.raises(CaptureError, match="An assertion about values cannot be part of a captured graph"):
        graphpp.compile(model, loss).step(x, target=x)
    assert "mock" not in repr(torch.compiler.is_compiling).lower() and not torch.compiler.is_exporting()


def test_torchs_own_code_is_told_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            told.append(torch.nn.functional._is_told())  # type: ignore[attr-defined]
            return super().forward(x)

    code = compile("import torch\ndef _is_told(): return torch.compiler.is_exporting()", nn.functional.__file__, "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    monkeypatch.setattr(nn.functional, "_is_told", namespace["_is_told"], raising=False)
    x = torch.randn(4, 4)
    graphpp.compile(Watching(4, 4), loss, debug=graphpp.Debug(audit=0)).step(x, target=x)  # an audit is no export
    assert told == [True]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated", "ignore:`torch.jit")
def test_scripted_functions_keep_their_gradients() -> None:
    """TorchScript asks too, in C++. It must get the truth: with False it would run code that the trace cannot follow."""

    function = torch.jit.script(swish)

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(function(self.first(x)))

    x = torch.randn(4, 4)
    for _ in range(4):  # the third call of a scripted function is the first optimised one
        model = Scripted()
        graphpp.compile(model, loss).step(x, target=x)
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        loss(model(x), x).backward()
        for mine, parameter in zip(found, model.parameters(), strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, parameter.grad)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)
