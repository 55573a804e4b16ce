"""The zoo: well-known models of transformers, diffusers and peft, unmodified, small, with random weights.

Contract: `ZOO[name]` says how to build the model (always the same parameters, in train mode, without dropout unless asked
for), a batch of ROWS rows that depends on a seed, the loss (None: the model's own, through `labels=`), and where to cut it.
`inexact` is empty, or the reason why the uncut joint graph's numbers are not eager's bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Batch, Loss, logits_loss

ROWS = 8
LENGTH = 8
VOCAB = 64
CLASSES = 10
WIDTH = 32

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    title: str
    build: Callable[..., nn.Module]  # build(dropout=0.0)
    inputs: Callable[[torch.Generator], Inputs]  # the model's keyword arguments
    loss: Loss | None = None
    target: Callable[[torch.Generator], Any] = lambda generator: None
    cuts: Sequence[Sequence[str]] = ()  # FQNs at which stages 1.. begin, beside split=2 and split=4: 1 or 3
    inexact: str = ""
    dropout: bool = False  # whether `build` takes a probability of dropout

    @property
    def library(self) -> str:
        """Where the model is from."""
        return {"lora_llama": "peft", "unet": "diffusers"}.get(self.build.__name__, "transformers")

    def model(self, dropout: float = 0.0) -> nn.Module:
        """The model with the same parameters on every call and every rank."""
        torch.manual_seed(0)
        return (self.build(dropout) if dropout else self.build()).train()

    def batch(self, seed: int) -> Batch:
        """A batch of ROWS rows."""
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs(generator)
        return Batch((), inputs, self.target(generator))


def words(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    """Token numbers, int64 [ROWS, length], none of them special (0 to 3)."""
    return torch.randint(4, VOCAB, (ROWS, length), generator=generator)


def text(generator: torch.Generator) -> Inputs:
    return {"input_ids": words(generator)}


def labelled_text(generator: torch.Generator) -> Inputs:
    """For causal language models, which shift the labels themselves."""
    tokens = words(generator)
    return {"input_ids": tokens, "labels": tokens}


def padded_text(generator: torch.Generator) -> Inputs:
    """Sequences of different lengths, padded at the end; padding has no label."""
    tokens = words(generator)
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1), generator=generator)).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def masked_text(generator: torch.Generator) -> Inputs:
    """For masked language models: the first word of each sequence and some others are hidden, and to be found."""
    tokens = words(generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.2
    hidden[:, 0] = True
    labels = tokens.masked_fill(~hidden, -100)
    return {"input_ids": tokens.masked_fill(hidden, 3), "attention_mask": torch.ones_like(tokens), "labels": labels}


def two_texts(generator: torch.Generator) -> Inputs:
    return {"input_ids": words(generator, 6), "labels": words(generator)}


def images(generator: torch.Generator, size: int = 16) -> Tensor:
    """float32 [ROWS, 3, size, size]."""
    return torch.randn(ROWS, 3, size, size, generator=generator)


def classes(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=generator)


def labelled_images(generator: torch.Generator) -> Inputs:
    return {"pixel_values": images(generator), "labels": classes(generator)}


# ---------------------------------------------------------------------------------------------------- language models

DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = DECODER | {"num_key_value_heads": 2}


def llama(dropout: float = 0.0) -> nn.Module:
    config = transformers.LlamaConfig(**GROUPED, attention_dropout=dropout, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, tie_word_embeddings=False))


def gemma() -> nn.Module:
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, tie_word_embeddings=True))


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**GROUPED, sliding_window=4, tie_word_embeddings=False)
    return transformers.MistralForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=WIDTH, n_layer=4, n_head=4, use_cache=False, tie_word_embeddings=True,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def lora_llama() -> nn.Module:
    """Llama with low-rank adapters; everything else is frozen."""
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(llama(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # peft's zeros make the gradient of lora_A zero
    return adapted


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, state_size=4, num_hidden_layers=4, conv_kernel=4, use_cache=False,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.MambaForCausalLM(config)


BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}


def bert(dropout: float = 0.0) -> nn.Module:
    config = transformers.BertConfig(**BERT, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return transformers.BertForMaskedLM(config)


def albert() -> nn.Module:
    config = transformers.AlbertConfig(
        **BERT, embedding_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.AlbertForMaskedLM(config)


def t5(dropout: float = 0.0) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=dropout, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


# ------------------------------------------------------------------------------------------ speech, images, diffusion

MEL = 8
FRAMES = 16


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=MEL, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=FRAMES // 2,
        max_target_positions=16, dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def speech(generator: torch.Generator) -> Inputs:
    return {"input_features": torch.randn(ROWS, MEL, FRAMES, generator=generator), "labels": words(generator)}


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, image_size=16, patch_size=4, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1, 2, 1, 1], layer_type="basic", num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config)


def unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def noisy_images(generator: torch.Generator) -> Inputs:
    return {"sample": images(generator, 8), "timestep": torch.randint(1000, (ROWS,), generator=generator)}


def noise(generator: torch.Generator) -> Tensor:
    return images(generator, 8)


def sample_loss(output: Any, target: Tensor) -> Tensor:
    """Mean squared error of the predicted noise."""
    return F.mse_loss(output.sample, target)


def clip() -> nn.Module:
    tower = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**tower, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


def captioned_images(generator: torch.Generator) -> Inputs:
    tokens = words(generator)
    tokens[:, -1] = 2  # the end of the text, whose state stands for the whole
    return {"input_ids": tokens, "pixel_values": images(generator), "return_loss": True}


# ------------------------------------------------------------------------------------------------------------ register

UPSAMPLING = (
    "torch.export decomposes nearest upsampling into indexing, whose gradient is contiguous; that of eager's kernel is "
    "channels-last, and the bias gradient of a 1x1 convolution further down is summed in the order of the memory"
)

ZOO: dict[str, Entry] = {
    "llama": Entry(
        "Llama", llama, text, logits_loss, words, dropout=True,
        cuts=[
            ["model.layers.0.self_attn.k_proj"],
            ["model.layers.0.mlp", "model.layers.2.post_attention_layernorm", "lm_head"],
        ],
    ),
    "qwen3": Entry("Qwen3", qwen3, labelled_text, cuts=[["model.layers.1.self_attn.k_norm"]]),
    "gemma": Entry("Gemma (tied)", gemma, padded_text, cuts=[["model.norm"]]),
    "gpt2": Entry(
        "GPT-2 (tied)", gpt2, labelled_text, dropout=True,
        cuts=[["transformer.h.0.attn.c_proj", "transformer.h.2.ln_2", "transformer.ln_f"]],
    ),
    "mistral": Entry("Mistral", mistral, labelled_text),
    "mixtral": Entry(
        "Mixtral (router loss)", mixtral, labelled_text,
        cuts=[["model.layers.1.mlp", "model.layers.2.self_attn.o_proj", "model.norm"]],
    ),
    "bert": Entry("BERT, masked LM", bert, masked_text, dropout=True, cuts=[["bert.encoder.layer.1.attention.self.value"]]),
    "albert": Entry("ALBERT", albert, masked_text),
    "t5": Entry(
        "T5", t5, two_texts, dropout=True, cuts=[["encoder.block.1.layer.1", "encoder.final_layer_norm", "lm_head"]]
    ),
    "whisper": Entry("Whisper", whisper, speech, cuts=[["model.encoder.conv2"]]),
    "vit": Entry(
        "ViT", vit, lambda generator: {"pixel_values": images(generator)}, logits_loss, classes, cuts=[["classifier"]]
    ),
    "resnet": Entry(
        "ResNet", resnet, labelled_images, cuts=[["resnet.encoder.stages.1.layers.1.layer.0.normalization"]]
    ),
    "unet": Entry(
        "UNet2DModel", unet, noisy_images, sample_loss, noise, inexact=UPSAMPLING,
        cuts=[["down_blocks.1.attentions.0", "mid_block.attentions.0", "up_blocks.1.resnets.1.conv_shortcut"]],
    ),
    "clip": Entry("CLIP", clip, captioned_images, cuts=[["text_model.final_layer_norm"]]),
    "lora_llama": Entry(
        "PEFT-LoRA Llama", lora_llama, labelled_text,
        cuts=[["base_model.model.model.layers.1.self_attn.q_proj.lora_B.default"]],
    ),
    "mamba": Entry("Mamba", mamba, labelled_text, cuts=[["backbone.layers.2.mixer.out_proj"]]),
}  # fmt: skip
