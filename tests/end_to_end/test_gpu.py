"""The same numbers on CUDA: one process with all stages on one GPU, and one rank per GPU over NCCL.

Run with `pytest -m gpu`; skipped where there is no GPU. Against eager on the same GPU the tolerance is that of kernels
that may be chosen differently; against the uncut joint graph there is none.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import graphpp
from examples import llama
from graphpp.backends.cuda_graphs import CudaGraphRecorder, copies_of, record
from graphpp.runtime.task import Task
from tests.end_to_end.test_cuda_graphs import TRAININGS
from tests.end_to_end.test_cuda_graphs import trained as keeping_all
from tests.internals import recording_tasks
from tests.models import MODELS
from tests.reference import eager_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def one_step(name: str, steps: int = 1, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients of the last of several steps, each from no gradients."""
    case = MODELS[name]()
    pipe = graphpp.compile(case.model, case.loss, parallel=graphpp.Parallel(device="cuda"), **options)
    for _ in range(steps - 1):
        pipe.step(*case.batch.args, target=case.batch.target, **case.batch.kwargs)
        pipe.zero_grad()
    losses = pipe.step(*case.batch.args, target=case.batch.target, **case.batch.kwargs).losses
    return losses, {fqn: p.grad for fqn, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "hf_gpt2", "hf_vit"])
@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_stages_on_one_gpu_equal_one_stage(name: str, schedule: str) -> None:
    losses, grads = one_step(name, schedule=schedule, split=4, microbatches=4)
    uncut_losses, uncut = one_step(name, microbatches=4)
    assert torch.equal(losses, uncut_losses) and grads.keys() == uncut.keys()
    assert all(torch.equal(grads[fqn], uncut[fqn]) for fqn in uncut)


@pytest.mark.parametrize("name", ["llama", "hf_gpt2", "hf_vit", "sequential"])
@pytest.mark.parametrize("graphs", [False, True])
def test_inductor_on_one_gpu(name: str, graphs: bool) -> None:
    backend = graphpp.Inductor(cudagraphs=graphs)
    losses, grads = one_step(name, steps=4, schedule="Interleaved1F1B", split=4, microbatches=4, backend=backend)
    uncut_losses, uncut = one_step(name, steps=4, microbatches=4)
    torch.testing.assert_close(losses, uncut_losses)
    assert grads.keys() == uncut.keys()
    for fqn, grad in grads.items():
        torch.testing.assert_close(grad, uncut[fqn], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_recomputation_on_one_gpu(backend: str) -> None:
    """Dropout is drawn a second time, alike. Triton contracts products and sums by the kernel in which they stand."""
    expected = dropped(backend)
    for choice in (0.5, "full"):
        found = dropped(backend, memory=graphpp.Memory(recompute=choice))
        if backend == "eager":
            assert_equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def dropped(backend: str, **options: Any) -> list[torch.Tensor]:
    """Losses and gradients of two steps of a model with dropout."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64)) for _ in range(4))
    pipe = graphpp.compile(
        nn.Sequential(*layers),
        nn.functional.mse_loss,
        parallel=graphpp.Parallel(device="cuda"),
        split=2,
        schedule="1F1B",
        microbatches=4,
        backend=backend,
        **options,
    )
    torch.manual_seed(1)
    batch = torch.randn(64, 64, device="cuda")
    losses = torch.cat([pipe.step(batch, target=batch).losses for _ in range(2)])
    return [losses, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_bfloat16_with_fused_attention(backend: str) -> None:
    """Attention over 128 tokens in bfloat16 is one kernel, whose random state is on the device."""

    def step(**options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = llama.Llama(llama.Config(256, 4, heads=4, vocab=512)).to("cuda", torch.bfloat16)
        torch.manual_seed(1)
        tokens = torch.randint(512, (8, 129), device="cuda")
        device = graphpp.Parallel(device="cuda")
        pipe = graphpp.compile(model, llama.loss, parallel=device, microbatches=4, **options)
        losses = pipe.step(tokens[:, :-1], target=tokens[:, 1:]).losses
        return losses, {fqn: p.grad for fqn, p in pipe.named_parameters() if p.grad is not None}

    losses, grads = step(split=4, schedule="InterleavedZeroBubble", backend=backend)
    uncut_losses, uncut = step()
    torch.testing.assert_close(losses, uncut_losses, rtol=1e-2, atol=1e-2)
    assert grads.keys() == uncut.keys()
    for fqn, grad in grads.items():
        assert relative_error(grad, uncut[fqn]) < (0.05 if backend == "inductor" else 1e-9)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_verify_on_the_gpu(backend: str) -> None:
    case = MODELS["llama"]()
    example = graphpp.Microbatch(case.batch.args, case.batch.kwargs, case.batch.target)
    report = graphpp.verify(
        case.model.cuda(), case.loss, example, split=2, schedule="1F1B", backend=backend, parallel="cuda"
    )
    assert report.ok, report


def test_stages_are_timed_and_a_step_is_foretold() -> None:
    pipe, _, _ = trained(schedule="Interleaved1F1B", split=4)
    batch = torch.randn(8 * 4096, 1024, device="cuda")
    profile = pipe.profile(batch, target=batch)
    assert all(stage.forward > 0 for stage in profile.costs.stages)
    assert min(profile.steps) * 0.5 < profile.predict() < max(profile.steps) * 2


def test_a_training_resumes_on_the_gpu(tmp_path: Path) -> None:
    """The optimizer's state too, in another split."""
    pipe, _, _ = trained()
    optimizer = torch.optim.AdamW(pipe.parameters())
    optimizer.step()
    pipe.checkpoint(optimizer).save(tmp_path / "checkpoint")
    other, _, _ = trained(steps=2, schedule="1F1B", split=4)
    resumed = torch.optim.AdamW(other.parameters())
    other.checkpoint(resumed).load(tmp_path / "checkpoint")
    assert_equal(list(other.parameters()), list(pipe.parameters()))
    for name in ("exp_avg", "exp_avg_sq"):
        assert_equal(*([state[name] for state in each.state.values()] for each in (resumed, optimizer)))


def test_memory_of_a_step_is_given_back() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    pipe = graphpp.compile(
        model,
        nn.functional.mse_loss,
        parallel=graphpp.Parallel(device="cuda"),
        split=2,
        schedule="1F1B",
        microbatches=4,
    )
    batch = torch.randn(64, 512, device="cuda")
    for _ in range(2):
        pipe.step(batch, target=batch)
    before = torch.cuda.memory_allocated()
    pipe.step(batch, target=batch)
    assert torch.cuda.memory_allocated() == before


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation for which the host waits for the GPU raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not notice everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layers(width: int = 1024, count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))


def trained(steps: int = 4, **options: Any) -> tuple[graphpp.Pipeline, list[torch.Tensor], int]:
    """Pipeline, losses and gradients of the last step, and the most bytes that it had more than before it."""
    options = {"schedule": "GPipe", "split": 2, "microbatches": 8, **options}
    pipe = graphpp.compile(layers(), nn.functional.mse_loss, parallel=graphpp.Parallel(device="cuda"), **options)
    torch.manual_seed(1)
    batch = torch.randn(8 * 4096, 1024, device="cuda")
    for _ in range(steps - 1):
        pipe.step(batch, target=batch)
        for parameter in pipe.parameters():
            parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_waiting():
        losses = pipe.step(batch, target=batch).losses
    torch.cuda.synchronize()
    grads = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]  # a step adds in place
    return pipe, [losses, *grads], torch.cuda.max_memory_allocated() - before


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_offload_gives_the_same_bits(schedule: str) -> None:
    _, expected, _ = trained(schedule=schedule)
    for choice in (True, 0.3, lambda value: value.nbytes > 0):
        pipe, found, _ = trained(schedule=schedule, memory=graphpp.Memory(offload=choice))
        assert_equal(found, expected)
        assert schedule != "GPipe" or "offloaded" in str(pipe)


def test_a_pinned_batch_may_be_written_after_a_step() -> None:
    def step(*, spoiled: bool) -> list[torch.Tensor]:
        options = {"parallel": graphpp.Parallel(device="cuda"), "split": 2, "schedule": "GPipe", "microbatches": 8}
        pipe = graphpp.compile(layers(), nn.functional.mse_loss, **options)
        torch.manual_seed(1)
        batch = torch.randn(8 * 4096, 1024).pin_memory()
        pipe.step(batch, target=batch)
        pipe.zero_grad()
        losses = pipe.step(batch, target=batch).losses
        if spoiled:
            batch.zero_()
        return [losses, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)]

    assert_equal(step(spoiled=True), step(spoiled=False))


def test_what_is_away_leaves_room() -> None:
    """GPipe holds 8 microbatches at its peak; with offload about 3 of what may leave."""
    _, _, whole = trained()
    _, _, less = trained(memory=graphpp.Memory(offload=True))
    assert less < 0.7 * whole


def test_no_less_memory_is_predicted_than_is_taken() -> None:
    """A cap below the weights and what a step with offload takes, without a gradient on its way and workspaces, is refused."""
    _, _, taken = trained(memory=graphpp.Memory(offload=True))  # without the weights, which are as large as one gradient
    with pytest.raises(graphpp.ScheduleError, match="bytes are alive here"):
        trained(steps=2, memory=graphpp.Memory(offload=True, optimizer="sgd", cap=taken - (64 << 20)))


def test_a_step_that_fails_with_values_away() -> None:
    pipe, expected, _ = trained(memory=graphpp.Memory(offload=True))
    arguments, batch = Task.arguments, torch.randn(8 * 4096, 1024, device="cuda")

    def failing(task: Task) -> list[Any]:
        if task.program.stage == 0 and task.key.phase == "B" and task.key.microbatch == 3:
            raise RuntimeError("out of luck")
        return arguments(task)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
        patch.setattr(Task, "arguments", failing)
        pipe.step(batch, target=batch)
    for parameter in pipe.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    batch = torch.randn(8 * 4096, 1024, device="cuda")
    losses = pipe.step(batch, target=batch).losses
    assert_equal([losses, *(p.grad for p in pipe.parameters() if p.grad is not None)], expected)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(("offload", "whole"), [(None, True), (None, False), (True, False)])
def test_graphs_give_the_same_bits(schedule: str, offload: bool | None, whole: bool) -> None:
    """The step as one graph, or each task as one, as it is under offload."""
    _, expected, _ = trained(schedule=schedule)
    with nullcontext() if whole else recording_tasks():
        backend = graphpp.Eager(cudagraphs=True)
        pipe, found, _ = trained(schedule=schedule, memory=graphpp.Memory(offload=offload), backend=backend)
    assert_equal(found, expected)
    states = pipe.cudagraphs
    assert states["stage 0 forward"] == states["stage 1 forward"] == "replayed"
    part = "weight_grad" if schedule == "ZBVZeroBubble" else "backward"  # the other programs are there, and do not run
    assert states[f"stage 0 {part}"] == states[f"stage 1 {part}"] == "replayed"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("options", "given"), TRAININGS)
def test_graphs_copy_what_outlives_a_step(options: Mapping[str, Any], given: Mapping[str, Any], whole: bool) -> None:
    options = {**options, "parallel": graphpp.Parallel(device="cuda")}
    expected = keeping_all(options, **given)
    with nullcontext() if whole else recording_tasks():
        found = keeping_all({**options, "backend": graphpp.Eager(cudagraphs=True)}, **given)
    assert_equal(found, expected)


def test_a_recorder_of_graphs_after_a_failure() -> None:
    """Arguments with gaps are copied in; a capture that CUDA refuses leaves the recorder as it was."""
    recorder = CudaGraphRecorder(torch.device("cuda", 0))

    def run(boxed: list[Any], *, refused: bool = False) -> list[torch.Tensor | None]:
        a, b, w = boxed
        boxed.clear()
        if refused:
            a.sum().item()
        y = (a + b) @ w
        return [y, y.t(), b]

    def given() -> list[torch.Tensor]:
        return [torch.randn(4, 6, device="cuda")[:, ::2], torch.randn(4, 6, device="cuda")[:, ::2], w]

    w = torch.randn(3, 3, device="cuda")
    recorder.warm_up(lambda: run(given()))
    recorder.prepare()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            record(recorder, lambda boxed: run(boxed, refused=True), given(), {2})
        arguments = given()
        expected = run([*arguments])
        recording, results = record(recorder, run, arguments, {2})
        assert_equal(results, expected)  # type: ignore[arg-type]
        del results
        arguments = given()
        expected = run([*arguments])
        assert recording.fits(arguments)
        results = recording.replay(arguments)
        assert_equal(results, expected)  # type: ignore[arg-type]
        assert all(map(recorder.owns, results))  # type: ignore[arg-type]
        assert_equal(copies_of(recorder, results), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "hf_gpt2", "hf_vit"])
def test_graphs_of_models_while_they_are_trained(name: str) -> None:
    """Parameters change in place between replays, and gradients live on while the next step runs."""

    def losses(**options: Any) -> list[torch.Tensor]:
        case = MODELS[name]()
        pipe = graphpp.compile(
            case.model,
            case.loss,
            parallel=graphpp.Parallel(device="cuda"),
            split=4,
            schedule="GPipe",
            microbatches=4,
            **options,
        )
        found, optimizer = [], None
        for _ in range(4):
            found.append(pipe.step(*case.batch.args, target=case.batch.target, **case.batch.kwargs).losses)
            optimizer = optimizer or torch.optim.SGD(list(pipe.parameters()), lr=1e-2)
            optimizer.step()
            optimizer.zero_grad()
        forwards = {state for name, state in pipe.cudagraphs.items() if "forward" in name}
        assert not options or forwards == {"replayed"}  # the backward of attention may read its random state on the host
        return found

    for one, other in zip(losses(backend=graphpp.Eager(cudagraphs=True)), losses(), strict=True):
        torch.testing.assert_close(one, other)


def test_dropout_is_run_without_a_graph() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    pipe = graphpp.compile(
        model,
        nn.functional.mse_loss,
        parallel=graphpp.Parallel(device="cuda"),
        split=["2"],
        microbatches=4,
        backend=graphpp.Eager(cudagraphs=True),
    )
    batch = torch.randn(64, 64, device="cuda")
    for _ in range(2):
        pipe.step(batch, target=batch)
    assert "random numbers" in pipe.cudagraphs["stage 0 forward"]
    assert pipe.cudagraphs["stage 1 forward"] == "replayed"


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
