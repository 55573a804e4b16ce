# whole_batch.py
from network import batch, network
from torch import nn
from torch.nn import functional as F

import graphpp

images, labels = batch(0)
for kind in ("batch norm", "group norm"):
    model = network()
    for block in model[1:5] if kind == "group norm" else ():
        block.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2))
    report = graphpp.verify(
        model,
        F.cross_entropy,
        graphpp.Microbatch((images,), target=labels),
        split=["3"],
        microbatches=4,
        against="whole batch",
    )
    whole = report.whole_batch
    largest = max(each.relative for each in whole.largest.values())
    begins = f", from {whole.first.fqn} on" if whole.first else ""
    print(f"{kind}: stages against the uncut graph {report.cut.verdict}, graph against eager {report.eager.verdict}")
    print(f"{kind}: microbatches against the whole batch {whole.verdict}{begins}; gradients by up to {largest:.1%}")
