"""Evaluate, train, evaluate.

https://github.com/deepspeedai/DeepSpeed/issues/3649

`eval_batch`, `train_batch` and `eval_batch` in turn fail in DeepSpeed's pipeline. Here torch's schedule makes these calls, and
the gradients of the step are read after the second evaluation.
"""

import torch
from museum import batch, compare, eager, equal, gradients, mlp, named, outcomes, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()
expected = eager(model, mse_loss, x, y, 4)
plain = torch.stack([mse_loss(model(piece), target) for piece, target in zip(x.chunk(4), y.chunk(4), strict=True)]).detach()


def torch_rank(rank):
    schedule, mine = torch_pipeline(list(model), mse_loss, 4, "1F1B")
    for call in (schedule.eval, schedule.step, schedule.eval):
        call(*((x,) if rank == 0 else ()), **({"target": y, "losses": []} if rank else {}))
    return named(model, mine)


def theirs():
    first, second = outcomes(torch_rank, 2, seconds=20)
    failed = [each.text for each in (first, second) if not isinstance(each, dict)]
    return failed[0] if failed else compare(first | second, expected)


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    for call in (pipe.eval, pipe.step, pipe.eval):
        assert torch.equal(call(x, target=y).losses, plain)
    return f"losses and gradients {equal(gradients(model), expected)}"


show(theirs, ours)
