"""Small models with their loss and a batch, the same on every call and on every rank.

Contract: `MODELS[name](seed)` is a `Case` of a fresh model (always the same parameters, in train mode, no dropout), a
`loss(output, target)` or None where the output carries its own `.loss`, and a batch of 24 rows (8 and 3 microbatches
divide it) that depends on `seed`. Every model has 4 equal layers; `LAYERS[name]` says at which modules they start.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from examples import llama as llama_example

ROWS = 24
LENGTH = 16
VOCAB = 64
CLASSES = 10

Loss = Callable[[Any, Any], Tensor]


class Batch(NamedTuple):
    """What one step is given; the fields are those of `graphpp.Microbatch`, in the same order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None

    def microbatches(self, count: int) -> list["Batch"]:
        """`count` equal pieces along dimension 0; raises ValueError if the rows do not divide."""
        args = [_cut(value, count) for value in self.args]
        kwargs = {name: _cut(value, count) for name, value in self.kwargs.items()}
        target = _cut(self.target, count)
        return [
            Batch(
                tuple(pieces[index] for pieces in args),
                {name: pieces[index] for name, pieces in kwargs.items()},
                target[index],
            )
            for index in range(count)
        ]


def _cut(value: Any, count: int) -> Sequence[Any]:
    """A tensor's `count` equal pieces; anything else `count` times whole."""
    if not isinstance(value, Tensor):
        return [value] * count
    if len(value) % count:
        raise ValueError(f"{len(value)} rows do not divide into {count} microbatches")
    return value.split(len(value) // count)


class Case(NamedTuple):
    """A model, its loss, and one batch for it."""

    model: nn.Module
    loss: Loss | None
    batch: Batch


def llama(seed: int = 0) -> Case:
    """The examples' own Llama."""
    torch.manual_seed(0)
    model = llama_example.Llama(llama_example.Config(dim=32, layers=4, heads=4, vocab=VOCAB)).apply(llama_example.initialise)
    tokens, targets = _text(seed)
    return Case(model, llama_example.loss, Batch((tokens,), {}, targets))


def hf_llama(seed: int = 0) -> Case:
    """Hugging Face's Llama, the loss outside."""
    tokens, targets = _text(seed)
    return Case(_hf_llama(), logits_loss, Batch((), {"input_ids": tokens}, targets))


def hf_llama_labels(seed: int = 0) -> Case:
    """Hugging Face's Llama, the loss its own."""
    tokens, _ = _text(seed)
    return Case(_hf_llama(), None, Batch((), {"input_ids": tokens, "labels": tokens}))


def hf_gpt2(seed: int = 0) -> Case:
    """Hugging Face's GPT-2, the loss outside."""
    tokens, targets = _text(seed)
    return Case(_hf_gpt2(), logits_loss, Batch((), {"input_ids": tokens}, targets))


def hf_gpt2_labels(seed: int = 0) -> Case:
    """Hugging Face's GPT-2, the loss its own."""
    tokens, _ = _text(seed)
    return Case(_hf_gpt2(), None, Batch((), {"input_ids": tokens, "labels": tokens}))


def logits_loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross entropy of a Hugging Face output's logits [..., classes] against class numbers [...]."""
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def _hf_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _hf_gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=2 * LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def _text(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, int64 [ROWS, LENGTH]."""
    text = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def hf_vit(seed: int = 0) -> Case:
    """Hugging Face's vision transformer, the loss outside."""
    images, classes = _images(seed)
    return Case(_hf_vit(), logits_loss, Batch((), {"pixel_values": images}, classes))


def hf_vit_labels(seed: int = 0) -> Case:
    """Hugging Face's vision transformer, the loss its own."""
    images, classes = _images(seed)
    return Case(_hf_vit(), None, Batch((), {"pixel_values": images, "labels": classes}))


def sequential(seed: int = 0) -> Case:
    """A plain `nn.Sequential`: 4 layers of Linear and Tanh between an entry and an exit, 10 modules in all."""
    torch.manual_seed(0)
    width = 16
    layers = [module for _ in range(4) for module in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Linear(8, width), *layers, nn.Linear(width, CLASSES))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ROWS, 8, generator=generator)
    classes = torch.randint(CLASSES, (ROWS,), generator=generator)
    return Case(model, F.cross_entropy, Batch((inputs,), {}, classes))


def _hf_vit() -> nn.Module:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config).train()


def _images(seed: int) -> tuple[Tensor, Tensor]:
    """Images float32 [ROWS, 3, 16, 16] and their classes int64 [ROWS]."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return images, torch.randint(CLASSES, (ROWS,), generator=generator)


# ------------------------------------------------------------------------------------------------------------ register

MODELS: dict[str, Callable[..., Case]] = {
    make.__name__: make
    for make in (llama, hf_llama, hf_llama_labels, hf_gpt2, hf_gpt2_labels, hf_vit, hf_vit_labels, sequential)
}

LAYERS: dict[str, list[str]] = {
    "llama": [f"layers.{index}" for index in range(4)],
    "hf_llama": [f"model.layers.{index}" for index in range(4)],
    "hf_llama_labels": [f"model.layers.{index}" for index in range(4)],
    "hf_gpt2": [f"transformer.h.{index}" for index in range(4)],
    "hf_gpt2_labels": [f"transformer.h.{index}" for index in range(4)],
    "hf_vit": [f"vit.layers.{index}" for index in range(4)],
    "hf_vit_labels": [f"vit.layers.{index}" for index in range(4)],
    "sequential": ["1", "3", "5", "7"],
}


def cuts(name: str, stages: int) -> list[str]:
    """The modules at which stages 1, 2, ... start when the 4 layers are spread over up to 4 stages."""
    layers = LAYERS[name]
    return [layers[stage * len(layers) // stages] for stage in range(1, stages)]


def batches(name: str, count: int) -> list[Batch]:
    """`count` different batches for one model; the first is `MODELS[name]().batch`."""
    return [MODELS[name](seed).batch for seed in range(count)]
