"""The last batch of an epoch is smaller.

https://github.com/awslabs/slapo/pull/19

DeepSpeed's pipeline hangs at the end of an epoch, where the batch has fewer rows, so the script drops that batch.
"""

from museum import batch, equal, gradients, mlp, named, outcomes, ranks, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch(16)
for rows in (16, 10):
    (mse_loss(model(x[:rows]), y[:rows])).backward()
expected = gradients(model)
model.zero_grad()


def torch_rank(rank):
    schedule, mine = torch_pipeline(list(model), mse_loss, 4, "1F1B")
    for rows in (16, 10):
        schedule.step(*((x[:rows],) if rank == 0 else ()), **({"target": y[:rows]} if rank else {}))
    return named(model, mine)


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4, gradients="rows")
    for rows in (16, 10):
        pipe.step(x[:rows], target=y[:rows])
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def theirs():
    first, second = outcomes(torch_rank, 2, seconds=10)
    failed = [each.text for each in (second, first) if not isinstance(each, dict)]
    return failed[0] if failed else f"right: {equal(first | second, expected, close=1e-6)}"


def ours():
    first, second = ranks(our_rank, 2)
    return f"{equal(first | second, expected, close=1e-6)} over the whole batches of 16 and 10 rows"


show(theirs, ours)
