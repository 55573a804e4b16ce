# load_adapters.py
import sys

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

differences = "".join(f"{a}-{b}={a - b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(differences.encode()))
starts = torch.randint(len(text) - 64, (16, 1), generator=torch.Generator().manual_seed(1_000_000))
unseen = text[starts + torch.arange(64)]

model = LlamaForCausalLM.from_pretrained("base")
if sys.argv[1:]:
    model = PeftModel.from_pretrained(model, sys.argv[1])
with torch.no_grad():
    print(f"unseen text: loss {model(input_ids=unseen, labels=unseen).loss:.4f}")
