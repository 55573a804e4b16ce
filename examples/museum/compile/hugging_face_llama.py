"""A Llama of transformers in torch's tracer.

https://github.com/pytorch/pytorch/issues/128394

`torch.distributed.pipelining` stopped tracing Hugging Face's Llama 2 and Llama 3.
"""

import torch
from museum import compare, equal, gradients, show, torch_step
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes))
tokens = torch.randint(0, 50, (4, 12))
for part in tokens.chunk(2):
    (model(input_ids=part, labels=part).loss / 2).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    cut = pipeline(model, (), {"input_ids": tokens[:2]}, split_spec={"model.layers.1": SplitPoint.BEGINNING})

    def loss(output, target):
        return model.loss_function(output if torch.is_tensor(output) else output[0], target, 50)

    torch_step([cut.get_stage_module(index) for index in range(2)], loss, tokens, tokens, 2)
    found = {name: p.grad for index in range(2) for name, p in cut.get_stage_module(index).named_parameters()}
    return compare({name: value for name, value in found.items() if name in expected}, expected, close=1e-5)


def ours():
    model.zero_grad()
    pipe = graphpp.compile(model, split=["model.layers.1"], microbatches=2)
    pipe.step(input_ids=tokens, labels=tokens)
    return equal(gradients(model), expected, close=1e-6)


show(theirs, ours)
