"""A causal language model in accelerate's loop, on a pipeline: torchrun --nproc-per-node 2 examples/accelerate_loop.py OUT

Three lines differ from the script for one process: two have a comment, and the third is the launcher.
"""

import sys

import torch
from text import corpus
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup, set_seed

from graphpp.integrations.accelerate import PipelineAccelerator  # one process: from accelerate import Accelerator

output, _ = sys.argv[1], set_seed(0)
usual = {"gradient_accumulation_steps": 2, "cpu": not torch.cuda.is_available()}
accelerator = PipelineAccelerator(pipeline={"microbatches": 4}, **usual)  # one process: Accelerator(
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config)
rows = [{"input_ids": row, "labels": row} for row in corpus(4000).long()[:3840].view(96, 40)]
loaders = torch.utils.data.DataLoader(rows[:80], 8, shuffle=True), torch.utils.data.DataLoader(rows[80:], 6)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 10)
model, optimizer, loader, evals, scheduler = accelerator.prepare(model, optimizer, *loaders, scheduler)
for epoch in range(2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(), scheduler.step(), optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(**batch).logits.argmax(-1), batch["labels"])) for batch in evals]
    right = sum((logits[:, :-1] == labels[:, 1:]).sum().item() for logits, labels in found)
    accelerator.print(f"epoch {epoch}: loss {loss:.4f}, norm {norm:.4f}, {right} tokens right")
    accelerator.save_state(f"{output}/epoch{epoch}")
weights, main = accelerator.get_state_dict(model), accelerator.is_main_process
accelerator.unwrap_model(model).save_pretrained(f"{output}/final", is_main_process=main, state_dict=weights)
