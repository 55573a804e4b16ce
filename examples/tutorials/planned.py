# planned.py
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphpp

sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(sums.encode()))


def batch(step, rows=16, length=64):
    starts = torch.randint(len(text) - length, (rows, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(length)]


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig.from_pretrained("tiny", use_cache=False))
plan = graphpp.TrainingPlan.from_json(Path("tiny.json").read_text())
rows = batch(0)[: plan.setting.rows]
example = graphpp.Microbatch((), {"input_ids": rows, "labels": rows})
pipe = graphpp.compile(model, example=example, plan=plan)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
for step in range(40):
    tokens = batch(step)
    loss = pipe.step(input_ids=tokens, labels=tokens).loss
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_last and step % 10 == 9:
        print(f"step {step}: loss {loss:.4f}")
if pipe.is_last:
    print(pipe.plan.schedule)
