# llama.py
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp

sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(sums.encode()))


def batch(step, rows=16, length=64):
    """Rows of the text from random places, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    return text[starts + torch.arange(length)]

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=128,
    use_cache=False,
)
model = LlamaForCausalLM(config)

rows = batch(0)[:2]  # a microbatch, for its shapes
pipe = graphpp.compile(
    model,
    example=graphpp.Microbatch((), {"input_ids": rows, "labels": rows}),
    split=2,
    microbatches=8,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)  # this process's parameters

checkpoint = pipe.checkpoint(optimizer)
checkpoint.load("run", missing_ok=True)  # False at the first start
last = int(sys.argv[1])
while pipe.steps < last:
    tokens = batch(pipe.steps)
    loss = pipe.step(input_ids=tokens, labels=tokens).loss
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_last and pipe.steps % 20 == 0:  # one process prints
        print(f"step {pipe.steps:3}: loss {loss:.4f}")
checkpoint.save("run")

pipe.save_weights("trained")
unseen = batch(1_000_000)
loss = pipe.eval(input_ids=unseen, labels=unseen).loss
if pipe.is_last:
    config.save_pretrained("trained")
    print(f"unseen text: loss {loss:.4f}")
