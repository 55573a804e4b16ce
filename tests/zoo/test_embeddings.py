"""Embeddings of images in a language model, as vision-language models make them: `inputs_embeds` give eager's loss."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests.zoo.models import ZOO

IMAGE, FEATURES = 3, 12


class VisionLanguage(nn.Module):
    """Puts image embeddings in the places of token 0, and others in front."""

    def __init__(self) -> None:
        super().__init__()
        self.language = ZOO["llama"].model()
        self.vision = nn.Linear(FEATURES, self.language.config.hidden_size)

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        text, seen = self.language.get_input_embeddings()(tokens), self.vision(images)
        text = text.masked_scatter((tokens == 0)[:, :, None].expand_as(text), seen)
        return self.language(inputs_embeds=torch.cat([seen, text], 1), use_cache=False).logits[:, IMAGE:]


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_image_embeddings_train_as_in_eager() -> None:
    torch.manual_seed(0)
    model = VisionLanguage()
    eager, tokens, images = copy.deepcopy(model), torch.randint(1, 20, (4, 8)), torch.randn(4, IMAGE, FEATURES)
    tokens[:, 2 : 2 + IMAGE] = 0
    step = graphpp.compile(model, loss, split=2, microbatches=2).step(tokens, images, target=tokens)
    losses = [loss(eager(x, y), x) for x, y in zip(tokens.chunk(2), images.chunk(2), strict=True)]
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(step.loss, torch.stack(losses).mean().detach())
    torch.testing.assert_close(model.vision.weight.grad, eager.vision.weight.grad)
