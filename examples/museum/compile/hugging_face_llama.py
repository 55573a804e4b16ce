"""A Llama of transformers in torch's tracer.

https://github.com/pytorch/pytorch/issues/128394

`torch.distributed.pipelining` stopped tracing Hugging Face's Llama 2 and Llama 3.
"""

import torch
from museum import compare, equal, gradients, ranks, show
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
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


def torch_rank(rank):
    cut = pipeline(model, (), {"input_ids": tokens[:2]}, split_spec={"model.layers.1": SplitPoint.BEGINNING})

    def loss(output, target):
        return model.loss_function(output if torch.is_tensor(output) else output[0], target, 50)

    stage = cut.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=loss)
    schedule.step(**({"target": tokens, "losses": []} if rank else {"input_ids": tokens}), return_outputs=False)
    return {name: value for name, value in gradients(stage.submod).items() if name in expected}


def theirs():
    first, second = ranks(torch_rank, 2, seconds=30)
    return compare(first | second, expected, close=1e-5)


def ours():
    model.zero_grad()
    pipe = graphpp.compile(model, split=["model.layers.1"], microbatches=2)
    pipe.step(input_ids=tokens, labels=tokens)
    return equal(gradients(model), expected, close=1e-6)


show(theirs, ours)
