# mesh.py
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import graphpp

stages, shards, last = map(int, sys.argv[1:])
device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
mesh = init_device_mesh(device, (stages, shards), mesh_dim_names=("pp", "dp_shard"))

sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(sums.encode()), device=device)


def batch(step, rows=64, length=16):
    """This process's windows of the text, int64 [rows / shards, length], and the byte that follows each."""
    starts = torch.randint(len(text) - length, (rows, 1), generator=torch.Generator().manual_seed(step)).to(device)
    windows = text[starts + torch.arange(length + 1, device=device)].chunk(shards)[mesh.get_local_rank("dp_shard")]
    return windows[:, :-1], windows[:, -1]

class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
head = [nn.Embedding(128, 16), nn.Flatten(), nn.Linear(256, 128)]
model = nn.Sequential(*head, *(Block() for _ in range(6)), nn.Linear(128, 128)).to(device)
tokens, following = batch(0)
pipe = graphpp.compile(
    model,
    F.cross_entropy,
    example=graphpp.Microbatch((tokens[:8],), target=following[:8]),
    mesh=mesh,
    split=stages,
    microbatches=8 // shards,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3, eps=1e-5)  # after compile, which makes the shards
checkpoint = pipe.checkpoint(optimizer)
checkpoint.load("run", missing_ok=True)

group = mesh.get_group("dp_shard")
first = mesh.get_local_rank("dp_shard") == 0
while pipe.steps < last:
    tokens, following = batch(pipe.steps)
    loss = pipe.step(tokens, target=following).loss
    dist.all_reduce(loss, group=group)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_last and first and pipe.steps % 50 == 0:
        print(f"step {pipe.steps}: loss {loss / shards:.4f}")
checkpoint.save("run")
if pipe.is_last and first:
    print(pipe.plan.memory)
dist.destroy_process_group()
