"""Three training steps through graphpp, in the shape of the eager reference's numbers, and how two of them differ.

Contract: `train` runs on one rank and returns what that rank has; `whole` joins the ranks; `differences` names by FQN
and step whatever is not bit-equal, so that a test asserts that there is nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import graphpp
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.trace import CapturedGraph
from tests import internals
from tests.distributed import DEVICE, on_cpu, run_ranks
from tests.models import MODELS, Batch, Case
from tests.reference import adamw, eager_steps
from tests.special_models import DEEP, SPECIAL

STEPS = 3
MAX_NORM = 0.5
PLAIN = (bool, int, float, str)
CASES: dict[str, Callable[..., Case]] = MODELS | SPECIAL | DEEP


class Numbers(NamedTuple):
    """What the steps gave on one rank, or on all: by step, by FQN."""

    losses: list[Tensor]
    norms: list[Tensor]
    grads: list[dict[str, Tensor | None]]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


def step(pipe: graphpp.Pipeline, batch: Batch) -> graphpp.StepResult:
    return pipe.step(*batch.args, target=batch.target, **batch.kwargs)


def compiled(case: Case, **options: Any) -> graphpp.Pipeline:
    return graphpp.compile(case.model, case.loss, **options)


def example(batch: Batch, microbatches: int) -> graphpp.Microbatch:
    return graphpp.Microbatch(*batch.microbatches(microbatches)[0])


def local_grads(pipe: graphpp.Pipeline) -> dict[str, Tensor | None]:
    return {fqn: None if p.grad is None else p.grad.clone() for fqn, p in pipe.named_parameters()}


def train(rank: int, name: str, options: Mapping[str, Any], steps: int = STEPS) -> Numbers:
    """This rank's numbers of `steps` steps of AdamW with clipping, each on another batch.

    The process captures the model once for each shape of its microbatches, see `capturing`.
    """
    with capturing(name):
        return _train(name, options, steps)


def _train(name: str, options: Mapping[str, Any], steps: int) -> Numbers:
    pipe = compiled(case_of(name), **options)
    numbers = Numbers([], [], [], {}, {})
    optimizer = None
    for seed in range(steps):
        if optimizer:
            optimizer.zero_grad()
        numbers.losses.append(step(pipe, case_of(name, seed).batch).losses)
        optimizer = optimizer or adamw(list(pipe.parameters()))
        numbers.grads.append(local_grads(pipe))
        numbers.norms.append(pipe.clip_grad_norm_(MAX_NORM))
        optimizer.step()
    numbers.params.update(pipe.named_parameters())
    numbers.buffers.update(pipe.named_buffers())
    return on_cpu(numbers)


def case_of(name: str, seed: int = 0) -> Case:
    """A model of `CASES` and its batch, on the device of the tests."""
    case = CASES[name](seed)
    if DEVICE.type == "cpu":
        return case
    return Case(case.model.to(DEVICE), case.loss, tree_map_only(Tensor, lambda each: each.to(DEVICE), case.batch))


Captures = dict[Any, CapturedGraph]
_captures: dict[str, Captures] = {}  # by name of the model in `CASES`: what this process captured


@contextmanager
def capturing_once(kept: Captures | None = None) -> Iterator[None]:
    """Compilations of equal models share a captured graph: a capture takes most of a short run's time, and knows no schedule.

    Captures are added to `kept`. Models of one type in it are equal if their texts, the layouts of their tensors, and the
    numbers and strings in attributes of their modules are.
    """
    kept = {} if kept is None else kept

    def capture(model: nn.Module, loss: Any, batch: graphpp.Microbatch, device: Any, **options: Any) -> CapturedGraph:
        named = (*model.named_parameters(), *model.named_buffers())
        tensors = [(name, each.shape, each.dtype, each.requires_grad) for name, each in named]
        plain = [{key: each for key, each in vars(module).items() if isinstance(each, PLAIN)} for module in model.modules()]
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        around = (FlatMicrobatch.of(batch).signature, str(device), autocast, str(sorted(options.items())))
        key = (type(model), str(model), str(tensors), str(plain), loss, *around)
        if key not in kept:
            kept[key] = internals.capture(model, loss, batch, device, **options)
        return replace(kept[key], joint=kept[key].joint.copy())

    with internals.capturing_by(capture):
        yield


def capturing(name: str) -> AbstractContextManager[None]:
    """Compilations of `CASES[name]()` share what this process captured of that model, also in an earlier test."""
    return capturing_once(_captures.setdefault(name, {}))


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def trained(ranks: int, name: str, steps: int = STEPS, **options: Any) -> Numbers:
    """All ranks' numbers; one rank runs in this process."""
    if ranks == 1:
        return train(0, name, options, steps)
    return whole(run_ranks(train, ranks, name, options, steps))


def eager(name: str, microbatches: int, steps: int = STEPS, **options: Any) -> Numbers:
    """The numbers of the plain loop."""
    case = case_of(name)
    batches = [case_of(name, seed).batch for seed in range(steps)]
    found = eager_steps(case.model, case.loss, batches, microbatches, steps, max_norm=MAX_NORM, **options)
    return on_cpu(Numbers(found.losses, found.norms, found.grads, found.params, found.buffers))


def whole(parts: Sequence[Numbers]) -> Numbers:
    """All ranks' numbers as one; what several ranks have must be the same on all of them."""
    first = parts[0]
    for part in parts[1:]:
        assert unequal_lists(part.losses, first.losses) + unequal_lists(part.norms, first.norms) == []
    grads = [joined([part.grads[index] for part in parts]) for index in range(len(first.grads))]
    params = joined([part.params for part in parts])
    return Numbers(first.losses, first.norms, grads, params, joined([part.buffers for part in parts]))


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One mapping of all; a name that several have must mean the same bits."""
    found: dict[str, Any] = {}
    for part in parts:
        assert [fqn for fqn, value in part.items() if fqn in found and not same(found[fqn], value)] == []
        found.update(part)
    return found


def differences(one: Numbers, other: Numbers) -> list[str]:
    """What is not bit-equal."""
    lines = [f"losses of step {index}" for index in unequal_lists(one.losses, other.losses)]
    lines += [f"norm of step {index}" for index in unequal_lists(one.norms, other.norms)]
    for index, (mine, theirs) in enumerate(zip(one.grads, other.grads, strict=True)):
        lines += [f"gradient of {fqn} in step {index}" for fqn in unequal(mine, theirs)]
    lines += [f"parameter {fqn}" for fqn in unequal(one.params, other.params)]
    return lines + [f"buffer {fqn}" for fqn in unequal(one.buffers, other.buffers)]


def unequal_lists(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[int]:
    return [index for index, (a, b) in enumerate(zip(one, other, strict=True)) if not same(a, b)]


def unequal(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> list[str]:
    """Names under which the two differ, or which only one has."""
    absent = object()
    return sorted(fqn for fqn in one.keys() | other.keys() if not same(one.get(fqn, absent), other.get(fqn, absent)))


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other
