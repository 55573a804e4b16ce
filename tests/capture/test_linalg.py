"""`torch.linalg` factorisations: gradients are eager's; a matrix that eager refuses raises in the stage that factorises it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import graphpp
from tests.models import Batch
from tests.reference import eager_steps, gradients

D = 4
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "solve": lambda matrix: torch.linalg.solve(matrix, matrix.sin()),
    "normal": lambda matrix: MultivariateNormal(matrix[0], covariance_matrix=matrix).log_prob(matrix.sin()),
}


class Factored(nn.Module):
    """Two stages with the factorisation of a positive definite matrix in each; with `ridge` 0 the matrix is singular."""

    def __init__(self, function: Callable[[Tensor], Tensor], ridge: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.function, self.ridge = function, ridge

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            hidden = layer(x).tanh()
            matrix = hidden.mT @ hidden + torch.eye(D, dtype=x.dtype)
            x = self.function(matrix * self.ridge).sum() + hidden
        return x


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def compiled(model: nn.Module) -> graphpp.Pipeline:
    return graphpp.compile(model, mean_square, split=["second"], schedule="GPipe", microbatches=2)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_eagers(name: str) -> None:
    model = Factored(FUNCTIONS[name]).double()
    batch = Batch((torch.randn(6, D).double(),), {}, torch.randn(6, D).double())
    eager = eager_steps(model, mean_square, [batch], 2, 1, None)
    pipe = compiled(model)
    example = graphpp.Microbatch(batch.args, target=batch.target)
    assert graphpp.verify(model, mean_square, example, split=["second"], microbatches=2).ok
    result = pipe.step(*batch.args, target=batch.target)
    torch.testing.assert_close(result.losses, eager.losses[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model), eager.grads[0], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["cholesky", "inv", "solve"])
def test_a_singular_matrix_raises(name: str) -> None:
    model, x = Factored(FUNCTIONS[name], ridge=0.0), torch.randn(6, D)
    with pytest.raises(torch.linalg.LinAlgError):
        model(x)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(model).step(x, target=x)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(model).eval(x)


class OfABuffer(nn.Module):
    """Reads the inverse of a buffer, which every stage can compute by itself."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("buffer", buffer)

    def forward(self, x: Tensor) -> Tensor:
        inverse = torch.linalg.inv(self.buffer)
        return self.second(self.first(x) @ inverse) @ inverse


@pytest.mark.parametrize("singular", [False, True])
def test_a_buffer_is_checked_too(singular: bool) -> None:
    torch.manual_seed(0)
    model, x = OfABuffer(torch.eye(D) * (not singular)), torch.randn(6, D)
    if singular:
        with pytest.raises(torch.linalg.LinAlgError):
            compiled(model).step(x, target=x)
    else:
        example = graphpp.Microbatch((x,), target=x)
        assert graphpp.verify(model, mean_square, example, split=["second"], microbatches=2).ok
