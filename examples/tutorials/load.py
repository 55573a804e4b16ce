# load.py
import torch
from transformers import LlamaForCausalLM

sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(sums.encode()))
starts = torch.randint(len(text) - 64, (16, 1), generator=torch.Generator().manual_seed(1_000_000))
unseen = text[starts + torch.arange(64)]  # the same rows

model = LlamaForCausalLM.from_pretrained("trained").eval()
with torch.no_grad():
    loss = model(input_ids=unseen, labels=unseen).loss
print(f"unseen text: loss {loss:.4f}")
