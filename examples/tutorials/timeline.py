# timeline.py
import sys
import time
from pathlib import Path

import torch
from torch import nn

import graphpp
from graphpp import schedules

torch.set_num_threads(1)
torch.manual_seed(0)
start, microbatches = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(*(nn.Sequential(nn.Linear(768, 768), nn.Tanh()) for _ in range(8)))
inputs, target = torch.randn(2, 64 * microbatches, 768)
pipe = graphpp.compile(
    model,
    nn.functional.mse_loss,
    example=graphpp.Microbatch((inputs[:64],), target=target[:64]),
    split=[start],
    microbatches=microbatches,
)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
for _ in range(10):
    loss = pipe.step(inputs, target=target).loss
    optimizer.step()
    optimizer.zero_grad()

profile = pipe.profile(inputs, target=target)
timeline = profile.timeline  # every computation and message of a step, with start and end
if pipe.is_last:
    print(profile)
    for rank in range(2):
        print(f"rank {rank} computes {timeline.busy(rank) * 1e3:.0f} ms, and waits about {timeline.bubble(rank):.0%}")
    Path("timeline.svg").write_text(graphpp.svg(timeline))

def measured(count=7):
    """The median seconds of a step."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        pipe.step(inputs, target=target)
        pipe.zero_grad()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[count // 2]


def predicted(generate, count):
    """The seconds of a step under a schedule, with its messages."""
    return profile.predict(schedules.add_send_recv(generate(2, 2, count)))


step = measured()
if pipe.is_last:
    print(f"measured {step * 1e3:.0f} ms, predicted {profile.predict() * 1e3:.0f} ms")
    for count in (2, 8, 32):
        whole = 8 / count * predicted(schedules.one_f_one_b, count)
        print(f"1F1B with {count} microbatches: {whole * 1e3:.0f} ms for the rows of 8")
    for generate in (schedules.gpipe, schedules.zb1p):
        print(f"{generate.__name__} with {microbatches}: {predicted(generate, microbatches) * 1e3:.0f} ms")

pipe.report("report", profile)
