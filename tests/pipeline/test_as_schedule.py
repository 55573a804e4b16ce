"""`pipe.as_schedule()` and torch's own schedule object, called alike on 2 ranks: same losses, outputs, gradients, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.nn import functional as F

import graphpp
from graphpp.pipeline.interfaces.as_schedule import TorchSchedule
from tests.distributed import run_ranks
from tests.exhaustive import further

WIDTH, ROWS, PARTS = 8, 8, 4
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """Layers that add a keyword argument, which torch's schedules give to every stage."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + shift
        return x


def whole(layers: int) -> Layers:
    torch.manual_seed(0)
    return Layers([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def loss(output: Tensor, target: Tensor, *, scale: Any = 1.0) -> Tensor:
    return F.mse_loss(output, target) * scale


SCALED = {"scale": torch.tensor(3.0)}
TORCH = {"1F1B": (Schedule1F1B, [[0], [1]]), "Interleaved1F1B": (ScheduleInterleaved1F1B, [[0, 2], [1, 3]]),
         "ZBVZeroBubble": (ScheduleZBVZeroBubble, [[0, 3], [1, 2]])}


class Theirs:
    """Torch's schedule object; each stage has one layer."""

    def __init__(self, rank: int, name: str, scale_grads: bool) -> None:
        kind, placed = TORCH[name]
        count = sum(map(len, placed))
        own = {at: Layers([layer]) for at, layer in enumerate(whole(count).layers) if at in placed[rank]}
        stages = [PipelineStage(module, at, count, torch.device("cpu")) for at, module in own.items()]
        schedule: Any = kind
        stage: Any = stages[0] if name == "1F1B" else stages
        self.schedule = schedule(stage, PARTS, loss_fn=loss, scale_grads=scale_grads)
        self._own = own

    def zero_grad(self) -> None:
        for module in self._own.values():
            module.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        pairs = ((at, fqn, parameter) for at, module in self._own.items() for fqn, parameter in module.named_parameters())
        return {fqn.replace("layers.0", f"layers.{at}"): parameter.grad for at, fqn, parameter in pairs}


class Ours:
    def __init__(self, rank: int, name: str, scale_grads: bool) -> None:
        count = sum(map(len, TORCH[name][1]))
        self.pipe = graphpp.compile(
            whole(count), loss, split=[f"layers.{at}" for at in range(1, count)], schedule=name, microbatches=PARTS,
            gradients="mean" if scale_grads else "sum", memory=graphpp.Memory(outputs=True),
        )
        self.schedule, self.zero_grad = self.pipe.as_schedule(), self.pipe.zero_grad

    def gradients(self) -> dict[str, Tensor]:
        return {fqn: parameter.grad for fqn, parameter in self.pipe.named_parameters()}


Called = Callable[[Any, bool, bool, list[Tensor]], Any]  # of the schedule object, on the first rank, on the last, with losses


def step(schedule: Any, first: bool, last: bool, losses: list[Tensor], **more: Any) -> Any:
    return schedule.step(*[X] * first, **({"target": Y, "losses": losses} if last else {}), **more)


def lists(schedule: Any, first: bool, last: bool, losses: list[Tensor]) -> Any:
    args = [(part,) for part in X.chunk(PARTS)] if first else None
    schedule._step_microbatches(args, None, list(Y.chunk(PARTS)) if last else None, losses, False)


def step_lists(schedule: Any, first: bool, last: bool, losses: list[Tensor]) -> Any:
    """The call of torch from 2.15 on; of older versions the one that it had."""
    lists = _lists(first, last)
    if not isinstance(schedule, TorchSchedule) and "arg_mbs" not in inspect.signature(schedule.step).parameters:
        return schedule._step_microbatches(*lists.values(), losses if last else None, False, loss_kwargs=SCALED)
    return schedule.step(**lists, losses=losses if last else None, return_outputs=False, loss_kwargs=SCALED)


def _lists(first: bool, last: bool) -> dict[str, Any]:
    return {
        "arg_mbs": [(part,) for part in X.chunk(PARTS)] if first else None,
        "kwarg_mbs": [{"shift": torch.tensor(0.1 * at)} for at in range(PARTS)],
        "target_mbs": list(Y.chunk(PARTS)) if last else None,
    }


def eval_lists(schedule: Any, first: bool, last: bool, losses: list[Tensor]) -> Any:
    """Lists that one rank gives for both, and the same data as a whole batch in older versions of torch."""
    lists = _lists(first, last)
    with torch.no_grad():
        if isinstance(schedule, TorchSchedule):
            return schedule.eval(**{**lists, "kwarg_mbs": None}, losses=losses if last else None)
    return evaluate(schedule, first, last, losses)


def evaluate(schedule: Any, first: bool, last: bool, losses: list[Tensor]) -> Any:
    with torch.no_grad():
        return schedule.eval(*[X] * first, **({"target": Y, "losses": losses} if last else {}))


CALLS: dict[str, Called] = {
    "step": step,
    "no outputs": lambda *given: step(*given, return_outputs=False),
    "kwargs": lambda *given: step(*given, shift=0.5),
    "loss_kwargs": lambda *given: step(*given, loss_kwargs={"scale": torch.tensor(3.0)}),
    "other loss_kwargs": lambda *given: step(*given, loss_kwargs={"scale": torch.tensor(5.0)}),
    "loss_kwargs on the last rank": lambda schedule, first, last, losses: step(
        schedule, first, last, losses, **({"loss_kwargs": {"scale": torch.tensor(7.0)}} if last else {})
    ),
    "lists": lists,
    "lists with keyword arguments": step_lists,
    "eval": evaluate,
    "eval of lists": eval_lists,
}


def _calls(name: str) -> dict[str, Called]:
    """Torch's zero bubble schedules cannot evaluate."""
    return {called: call for called, call in CALLS.items() if not called.startswith("eval") or name != "ZBVZeroBubble"}


def run(kind: type, rank: int, name: str, scale_grads: bool) -> list[Any]:
    made = kind(rank, name, scale_grads)
    last = rank == (0 if name == "ZBVZeroBubble" else 1)
    found: list[Any] = []
    for call in _calls(name).values():
        made.zero_grad()  # torch's schedules divide gradients of earlier steps again
        losses = [torch.zeros(())]  # a list that is to be emptied
        output = call(made.schedule, rank == 0, last, losses)
        grads = {fqn: None if grad is None else grad.clone() for fqn, grad in made.gradients().items()}
        found.append((output, losses, grads))
    return [made.schedule._n_microbatches, made.schedule.scale_grads, *found]


def both(rank: int, name: str, scale_grads: bool) -> tuple[list[Any], list[Any]]:
    torch.set_num_threads(1)
    return run(Theirs, rank, name, scale_grads), run(Ours, rank, name, scale_grads)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("name", "scale_grads"), [("1F1B", True), ("ZBVZeroBubble", False), *further(("Interleaved1F1B", True), ("1F1B", False))]
)
def test_calls_give_what_torchs_schedules_give(name: str, scale_grads: bool) -> None:
    for theirs, ours in run_ranks(both, 2, name, scale_grads):
        assert ours[:2] == theirs[:2]
        for call, mine, other in zip(_calls(name), ours[2:], theirs[2:], strict=True):
            assert (mine[0] is None) == (other[0] is None), call
            torch.testing.assert_close(mine, other, msg=lambda text, call=call: f"{call}: {text}")


def ours_only(schedule: Any) -> Any:
    """The schedule; of torch before 2.15, which has no lists here, one that raises as 2.15 does."""
    if isinstance(schedule, TorchSchedule) or "arg_mbs" in inspect.signature(schedule.step).parameters:
        return schedule
    raise ValueError


BAD: dict[str, tuple[type[Exception], Callable[[Any], object]]] = {
    "losses is no list": (TypeError, lambda schedule: schedule.step(X, target=Y, losses=())),
    "arg_mbs is no list": (TypeError, lambda schedule: schedule._step_microbatches((X,) * PARTS)),
    "too few arg_mbs": (ValueError, lambda schedule: schedule._step_microbatches([(X,)])),
    "too many target_mbs": (ValueError, lambda schedule: schedule._step_microbatches([(X,)] * PARTS, None, [Y] * 5)),
    "lists and a batch": (ValueError, lambda schedule: ours_only(schedule).step(X, arg_mbs=[(X,)] * PARTS)),
    "no gradients": (RuntimeError, lambda schedule: torch.no_grad()(schedule.step)(X, target=Y)),
}


def refused(rank: int) -> None:
    torch.set_num_threads(1)
    theirs, ours = Theirs(rank, "1F1B", True).schedule, Ours(rank, "1F1B", True).schedule
    ours.step(*[X] * (rank == 0), **({"target": Y} if rank else {}))
    for error, call in BAD.values():
        for schedule in (theirs, ours):
            with pytest.raises(error):
                call(schedule)
    with pytest.raises(graphpp.MismatchError if rank == 0 else TypeError):
        ours.step(X, target=Y, losses=[] if rank == 0 else ())
    with pytest.raises(graphpp.MismatchError, match="let all ranks give lists"):
        ours.step(*[X] * (rank == 0), **({"target_mbs": list(Y.chunk(PARTS))} if rank else {}))
    ours.step(X, target=Y)


def test_errors_have_the_type_of_torchs_and_leave_the_pipeline_usable() -> None:
    run_ranks(refused, 2)


def test_arguments_that_no_other_rank_can_have_are_refused() -> None:
    schedule = graphpp.compile(whole(2), loss, split=["layers.1"], microbatches=PARTS).as_schedule(return_outputs=False)
    with pytest.raises(graphpp.BatchError, match="the arguments of the schedule: no other rank can have an object in it"):
        schedule.step(X, target=Y, shift=lambda: 0)


def test_the_plan_counts_the_outputs_that_a_step_keeps() -> None:
    def peak(outputs: bool, microbatches: int = PARTS) -> int:
        example = graphpp.Microbatch((X[:2],), target=Y[:2])
        options: dict[str, Any] = {"split": ["layers.1"], "microbatches": microbatches, "example": example}
        pipe = graphpp.compile(whole(2), loss, memory=graphpp.Memory(outputs=outputs), **options)
        return pipe.plan.memory.ranks[0].peak

    assert peak(True) - peak(False) == PARTS * X[:2].nbytes and peak(True, 8) - peak(False, 8) == 8 * X[:2].nbytes


def test_a_weight_of_the_losses_changes_the_gradients_alone() -> None:
    def run(weight: float | None) -> tuple[list[Tensor], list[Tensor]]:
        pipe = graphpp.compile(whole(2), loss, split=["layers.1"], microbatches=PARTS, gradients="sum",
                               example=graphpp.Microbatch((X[:2],), target=Y[:2]))
        losses: list[Tensor] = []
        pipe.as_schedule(return_outputs=False, loss_weight=weight).step(X, target=Y, losses=losses)
        return losses, [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]

    (plain, gradients), (same, doubled) = run(None), run(2.0)
    assert all(map(torch.equal, plain, same))
    assert all(torch.equal(2 * one, two) for one, two in zip(gradients, doubled, strict=True))
    with pytest.raises(graphpp.GraphPPError, match="loss_weight"):
        run(-1.0)


def test_a_pipeline_without_outputs_says_so() -> None:
    pipe = graphpp.compile(whole(2), loss, split=["layers.1"], microbatches=PARTS)
    with pytest.raises(graphpp.GraphPPError, match=r"memory=graphpp.Memory\(outputs=True\)"):
        pipe.as_schedule()
    schedule = pipe.as_schedule(return_outputs=False)
    with pytest.raises(graphpp.GraphPPError, match="return_outputs=False"):
        schedule.step(X, target=Y, return_outputs=True)
    assert schedule.step(X, target=Y) is None
