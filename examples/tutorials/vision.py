# vision.py
import copy

import torch
from network import batch, network
from torch.nn import functional as F

import graphpp

images, labels = batch(0)
model = network()
plain = copy.deepcopy(model)  # for the comparison, in section 3
pipe = graphpp.compile(
    model,
    F.cross_entropy,
    example=graphpp.Microbatch((images[:8],), target=labels[:8]),
    split=["3"],
    microbatches=4,
)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
losses = []
for step in range(20):
    images, labels = batch(step)
    losses.append(pipe.step(images, target=labels).loss.item())
    optimizer.step()
    optimizer.zero_grad()

unseen, truth = batch(1_000_000, rows=200)
result = pipe.eval(unseen, target=truth)  # with the running statistics, as model.eval() does
if pipe.is_last:
    right = (result.output.argmax(-1) == truth).float().mean()
    print(f"loss {losses[0]:.4f} in the first step, {losses[-1]:.2f} in the last; {right:.1%} of unseen images right")

optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
for step in range(20):
    images, labels = batch(step)
    for rows, wanted in zip(images.chunk(4), labels.chunk(4), strict=True):
        (F.cross_entropy(plain(rows), wanted) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()

state = pipe.gather()  # parameters and buffers of all stages, on the first rank
for kind in ("running_mean", "running_var", "num_batches_tracked", "weight"):
    pairs = [(value, plain.state_dict()[name]) for name, value in state.items() if name.endswith(kind)]
    if pairs:
        print(f"{len(pairs):2} {kind}: largest difference {max((a - b).abs().max().item() for a, b in pairs)}")
