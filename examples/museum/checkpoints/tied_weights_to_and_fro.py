"""Tied embeddings to and from Hugging Face's files.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/957

Loading a model with tied embeddings into more than two stages failed: stages in the middle had no part in the tie.
"""

import tempfile

import torch
from museum import not_run, ranks, show
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=50, use_cache=False, tie_word_embeddings=True, **sizes)
tokens = torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(0))


def our_rank(rank, folder):
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    example = graphpp.Microbatch(kwargs={"input_ids": tokens[:1], "labels": tokens[:1]})
    pipe = graphpp.compile(model, example=example, split=["model.layers.1", "model.layers.2"], microbatches=3)
    pipe.materialize(model._init_weights, weights=f"{folder}/from")
    loss = pipe.eval(input_ids=tokens, labels=tokens).loss
    pipe.save_weights(f"{folder}/to")
    return loss


def theirs():
    return not_run("megatron-bridge")


def ours():
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/from")
        found = ranks(our_rank, 3, folder)
        config.save_pretrained(f"{folder}/to")
        again = LlamaForCausalLM.from_pretrained(f"{folder}/to")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss for row in tokens]
    torch.testing.assert_close(found[0], torch.stack(losses).mean())
    return "loaded by 3 ranks, evaluated, saved, and read by `from_pretrained`: the same bits"


show(theirs, ours)
