# fixed.py
import torch
from tagger import Tagger, batch, loss

import graphpp

tokens, labels = batch(0)
torch.manual_seed(0)
model = Tagger()
old = loss(model(tokens), labels)

pipe = graphpp.compile(
    model,
    loss,
    example=graphpp.Microbatch((tokens[:4],), target=labels[:4]),
    split=["layers.2"],
    microbatches=4,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
for step in range(100):
    tokens, labels = batch(step)
    counts = torch.stack([(part != -100).sum() for part in labels.chunk(4)])
    new = pipe.step(tokens, target=labels, loss_weight=counts / counts.sum()).loss
    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and pipe.is_last:
        print(f"old script {old:.5f}, pipeline {new:.5f}")
if pipe.is_last:
    print(f"after 100 steps {new:.5f}")
