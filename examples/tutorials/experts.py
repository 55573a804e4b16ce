# experts.py
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import graphpp
from graphpp.experts import routed

sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(sums.encode()))
stages, last = map(int, sys.argv[1:])
parts = int(os.environ.get("WORLD_SIZE", "1")) // stages  # of the experts, and of the rows
mesh, own, group = None, 0, None
if stages * parts > 1:
    mesh = init_device_mesh("cpu", (stages, parts), mesh_dim_names=("pp", "ep"))
    own, group = mesh.get_local_rank("ep"), mesh.get_group("ep")


def batch(step, rows=16, length=64):
    """This process's rows of a batch."""
    starts = torch.randint(len(text) - length, (rows, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(length)].chunk(parts)[own]

def here(weight):
    """The experts of this process."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def spread(module, tokens, chosen, weights):
    def compute(x):  # [experts of this process, tokens, width]
        gate, up = (x @ here(module.gate_up_proj).mT).chunk(2, -1)
        return (module.act_fn(gate) * up) @ here(module.down_proj).mT

    return routed(tokens, chosen, weights, compute, module.num_experts, group)


ALL_EXPERTS_FUNCTIONS.register("spread", spread)

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    use_cache=False,
    experts_implementation="spread",
)
model = MixtralForCausalLM(config)
if mesh is not None:
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            for key, weight in list(module.named_parameters()):
                shard = distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])
                setattr(module, key, torch.nn.Parameter(shard))

rows = batch(0)[:2]
pipe = graphpp.compile(
    model,
    example=graphpp.Microbatch((), {"input_ids": rows, "labels": rows}),
    mesh=mesh,
    split=stages,
    microbatches=8 // parts,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3, foreach=False)
checkpoint = pipe.checkpoint(optimizer)
checkpoint.load("run", missing_ok=True)
while pipe.steps < last:
    tokens = batch(pipe.steps)
    loss = pipe.step(input_ids=tokens, labels=tokens).loss  # of this process's rows
    norm = pipe.clip_grad_norm_(1.0)  # each expert counted once
    optimizer.step()
    optimizer.zero_grad()
    if parts > 1:
        dist.all_reduce(loss, group=group)
    if pipe.is_last and own == 0 and pipe.steps % 10 == 0:
        print(f"step {pipe.steps}: loss {loss / parts:.4f}, norm of the gradients {norm:.3f}")
checkpoint.save("run")
