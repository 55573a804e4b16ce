"""The same numbers on CUDA: one process with all stages on one GPU, and one rank per GPU over NCCL.

Run with `pytest -m gpu`; skipped where there is no GPU. Against eager on the same GPU the tolerance is that of kernels
that may be chosen differently; against the uncut joint graph there is none.
"""

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import graphpp
from tests.models import MODELS
from tests.reference import eager_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def one_step(name: str, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    case = MODELS[name]()
    pipe = graphpp.compile(case.model, case.loss, device="cuda", **options)
    losses = pipe.step(*case.batch.args, target=case.batch.target, **case.batch.kwargs).losses
    return losses, {fqn: p.grad for fqn, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "hf_gpt2", "hf_vit"])
@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_stages_on_one_gpu_equal_one_stage(name: str, schedule: str) -> None:
    losses, grads = one_step(name, schedule=schedule, split=4, microbatches=4)
    uncut_losses, uncut = one_step(name, microbatches=4)
    assert torch.equal(losses, uncut_losses)
    assert all(torch.equal(grads[fqn], uncut[fqn]) for fqn in uncut)


def test_close_to_eager_on_the_gpu() -> None:
    case = MODELS["llama"]()
    batch = case.batch._replace(args=tuple(a.cuda() for a in case.batch.args), target=case.batch.target.cuda())
    eager = eager_steps(case.model.cuda(), case.loss, [batch], 4, steps=1, optimizer=None)
    losses, grads = one_step("llama", schedule="1F1B", split=2, microbatches=4)
    torch.testing.assert_close(losses, eager.losses[0])
    for fqn, grad in grads.items():
        torch.testing.assert_close(grad, eager.grads[0][fqn])


def test_memory_of_a_step_is_given_back() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    pipe = graphpp.compile(model, nn.functional.mse_loss, device="cuda", split=2, schedule="1F1B", microbatches=4)
    batch = torch.randn(64, 512, device="cuda")
    for _ in range(2):
        pipe.step(batch, target=batch)
    before = torch.cuda.memory_allocated()
    pipe.step(batch, target=batch)
    assert torch.cuda.memory_allocated() == before


def on_nccl(rank: int, ranks: int, port: int) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    losses, grads = one_step("llama", schedule="Interleaved1F1B", split=2 * ranks, microbatches=2 * ranks)
    uncut = eager_steps(*MODELS["llama"]()[:2], [MODELS["llama"]().batch], 2 * ranks, steps=1, optimizer=None)
    torch.testing.assert_close(losses.cpu(), uncut.losses[0])
    for fqn, grad in grads.items():
        torch.testing.assert_close(grad.cpu(), uncut.grads[0][fqn], rtol=1e-3, atol=1e-5)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_rank_per_gpu() -> None:
    mp.spawn(on_nccl, args=(2, 29871), nprocs=2)
