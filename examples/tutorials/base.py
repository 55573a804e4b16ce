# base.py
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(sums.encode()))

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(150):
    tokens = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(64)]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("base")
print(f"base: loss {loss:.3f}")
