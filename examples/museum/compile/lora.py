"""LoRA in a pipeline of two stages.

https://github.com/tdrussell/qlora-pipe/issues/56

Training with one stage works. With two stages it fails: element 1 of tensors does not require grad and does not have a
grad_fn. The values that a stage passes on include some without a gradient.
"""

import torch
from museum import equal, gradients, not_run, show
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
tokens = torch.randint(0, 50, (4, 12))
for part in tokens.chunk(2):
    (model(input_ids=part, labels=part).loss / 2).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    return not_run("deepspeed")


def ours():
    pipe = graphpp.compile(model, split=["base_model.model.model.layers.1"], schedule="ZBVZeroBubble", microbatches=2)
    pipe.step(input_ids=tokens, labels=tokens)
    trained = sum(value is not None for value in expected.values())
    return f"{equal(gradients(model), expected, close=1e-6)}: {trained} matrices of LoRA, under ZBVZeroBubble"


show(theirs, ours)
