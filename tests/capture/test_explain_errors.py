"""Errors of a trace name the user's line and a remedy that fits the fault."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import graphpp
from graphpp.errors import CaptureError
from tests.zoo.models import ZOO


@pytest.mark.exhaustive
def test_eager_experts_name_the_entry_of_the_configuration_and_another_implementation() -> None:
    entry = ZOO["mixtral"]
    model, batch = entry.model(), entry.batch(0)
    model.config._experts_implementation = "eager"
    words = r"_mixtral\.py:\d+ in forward(.|\n)*loops over experts unless config\._experts_implementation = 'grouped_mm'"
    with pytest.raises(CaptureError, match=words):
        graphpp.compile(model, entry.loss, split=2, microbatches=2).step(**batch.kwargs)
    model.config._experts_implementation = "grouped_mm"  # the remedy, on the same model
    assert graphpp.compile(model, entry.loss, split=2, microbatches=2).step(**batch.kwargs).loss.isfinite()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])[0]


class Masked(Packed):
    """The remedy."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        inside = torch.arange(tokens.shape[1]) < lengths[:, None]
        return self.rnn(self.embed(tokens))[0] * inside[:, :, None]


class Asserting(Packed):
    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.max() <= tokens.shape[1]
        return self.embed(tokens)


TOKENS, LENGTHS, TARGET = torch.ones(4, 5, dtype=torch.int64), torch.tensor([5, 3, 4, 1]), torch.zeros(4, 5, 4)


@pytest.mark.parametrize(("kind", "remedy"), [(Packed, "on the padded batch"), (Asserting, "leave it out, or check the batch")])
def test_an_idiom_has_its_own_remedy(kind: type[nn.Module], remedy: str) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)at {__file__}:\d+ in forward.*{remedy}"):
        graphpp.compile(kind(), F.mse_loss).step(TOKENS, LENGTHS, target=TARGET)


def test_a_mask_replaces_a_packed_sequence() -> None:
    packed, masked = Packed(), Masked()
    masked.load_state_dict(packed.state_dict())
    loss = F.mse_loss(packed(TOKENS, LENGTHS), TARGET)
    loss.backward()
    step = graphpp.compile(masked, F.mse_loss, microbatches=1).step(TOKENS, LENGTHS, target=TARGET)
    torch.testing.assert_close(step.loss, loss.detach())
    for mine, theirs in zip(masked.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
