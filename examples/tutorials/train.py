# train.py
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
new = pipe.step(tokens, target=labels).loss
print(f"old script {old:.5f}, pipeline {new:.5f}")
