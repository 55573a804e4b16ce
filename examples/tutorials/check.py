# check.py
import torch
from tagger import Tagger, batch, loss

import graphpp

tokens, labels = batch(0)
torch.manual_seed(0)
report = graphpp.verify(
    Tagger(),
    loss,
    graphpp.Microbatch((tokens,), target=labels),
    split=["layers.2"],
    microbatches=4,
    against="whole batch",
    debug="dump",  # a folder for the graphs
)
print(report.cut)
print(report.eager)
print(report.whole_batch)
