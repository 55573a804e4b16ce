"""accelerate's example with a pipeline fails in the tracer.

https://github.com/huggingface/accelerate/issues/3151

The example that cuts a Llama for inference raises an error in `torch.export`.
"""

import torch
from accelerate import PartialState
from accelerate.inference import prepare_pippy
from museum import ranks, show
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes)).eval()
tokens = torch.randint(0, 50, (4, 12))
with torch.no_grad():
    expected = model(input_ids=tokens).logits


def accelerate_rank(rank):
    PartialState(cpu=True)
    example = {"input_ids": tokens[:2]}
    cut = prepare_pippy(model, split_points=["model.layers.1"], example_kwargs=example, num_chunks=2)
    with torch.no_grad():
        cut(input_ids=tokens)
    return "right: the cut model runs"


def theirs():
    return ranks(accelerate_rank, 2, seconds=30)[1]


def ours():
    pipe = graphpp.compile(model, split=["model.layers.1"], microbatches=2)
    found = pipe.eval(input_ids=tokens, use_cache=False)
    torch.testing.assert_close(found.output.logits, expected, rtol=1e-5, atol=1e-6)
    return "logits as in one process, within 1e-6"


show(theirs, ours)
