"""The number of microbatches is no multiple of the ranks.

https://github.com/pytorch/pytorch/pull/129597

Interleaved schedules require it, so the batch must follow the pipeline. The thread lifts the rule for some numbers.
"""

from copy import deepcopy

from museum import batch, compare, eager, equal, mlp, named, ranks, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(), batch(10)
expected = eager(model, mse_loss, x, y, 5)


def torch_rank(rank):
    _, mine = torch_step(list(model), mse_loss, x, y, 5, "Interleaved1F1B")
    return named(model, mine)


def our_rank(rank):
    found = {}
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "MegatronInterleaved"):
        memory = graphpp.Memory(release=False)
        pipe = graphpp.compile(
            deepcopy(model), mse_loss, split=["1", "2", "3"], schedule=schedule, microbatches=5, memory=memory
        )
        pipe.step(x, target=y)
        found[schedule] = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    return found


def theirs():
    first, second = ranks(torch_rank, 2, seconds=15)
    return compare(first | second, expected)


def ours():
    first, second = ranks(our_rank, 2)
    for schedule, found in first.items():
        said = equal(found | second[schedule], expected)
    return f"{said}; 5 microbatches on 2 ranks, {len(first)} interleaved schedules"


if __name__ == "__main__":
    show(theirs, ours)
