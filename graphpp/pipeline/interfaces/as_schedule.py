"""`pipe.as_schedule()`: a pipeline behind the interface of the schedules of `torch.distributed.pipelining`.

Contract
--------
- The calls are those of torch's schedule objects: the rank of the first stage gives the model's arguments, the rank of the last
  stage the targets; other ranks may give nothing. In each call the ranks exchange the shapes and plain data that were given.
- The rank of the last stage gets the losses (in the caller's list, one per microbatch) and the output of the whole batch.
- `step` accumulates gradients as `pipe.step`: their mean over the microbatches, or their sum for `gradients="sum"`, as
  `scale_grads` says. `eval` is `pipe.eval`, in eval mode whatever the flags of the modules.
- Errors in the arguments have the type that torch raises (`TypeError`, `ValueError`, `RuntimeError`) on the rank that made
  them, and are a `MismatchError` on the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from graphpp.batch.microbatch import Microbatch
from graphpp.errors import GraphPPError
from graphpp.pipeline.outputs import Exchange, as_bytes
from graphpp.pipeline.results import EvalResult, StepResult
from graphpp.planner.plan import Plan

_NO_GRAD = "step() needs gradients for its backward, and runs under torch.no_grad(): call eval() instead"
NO_OUTPUTS = (
    "as_schedule: step returns the model's output only if the pipeline keeps it: give memory=graphpp.Memory(outputs=True) to "
    "graphpp.compile, or as_schedule(return_outputs=False) for a caller that does not read it"
)


class Calls(Protocol):
    """The methods of a pipeline that a schedule object calls."""

    is_last: bool
    plan: Plan
    step: Callable[..., StepResult]
    step_microbatches: Callable[..., StepResult]
    eval: Callable[..., EvalResult]


class TorchSchedule:
    """A pipeline with the methods of a schedule object of `torch.distributed.pipelining`."""

    def __init__(self, pipe: Calls, exchange: Exchange, scale_grads: bool, return_outputs: bool) -> None:
        self._pipe, self._exchange, self._return_outputs = pipe, exchange, return_outputs
        self.scale_grads, self._has_backward = scale_grads, True

    @property
    def _n_microbatches(self) -> int:
        return self._pipe.plan.schedule.microbatches

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """A training step over the whole batch; returns its output on the rank of the last stage, None elsewhere."""
        batch = self._given(losses, lambda: Microbatch(args, kwargs, target, loss_kwargs or {}), True, return_outputs)
        result = self._pipe.step(*batch.args, target=batch.target, loss_kwargs=batch.loss_kwargs, **batch.kwargs)
        return self._returned(result, losses, return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """An evaluation of the whole batch; returns its output on the rank of the last stage, None elsewhere."""
        batch = self._given(losses, lambda: Microbatch(args, kwargs, target, loss_kwargs or {}), False)
        result = self._pipe.eval(*batch.args, target=batch.target, loss_kwargs=batch.loss_kwargs, **batch.kwargs)
        return self._returned(result, losses)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """A training step over microbatches that are given one by one."""
        read = partial(self._microbatches, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs or {})
        parts = self._given(losses, read, True, return_outputs)
        return self._returned(self._pipe.step_microbatches(parts), losses, return_outputs)

    def _microbatches(
        self, args: object, kwargs: object, targets: object, loss_kwargs: Mapping[str, Any]
    ) -> list[Microbatch]:
        count = self._n_microbatches
        for name, given in (("arg_mbs", args), ("kwarg_mbs", kwargs), ("target_mbs", targets)):
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list but got a {type(given)}")
            if given is not None and len(given) != count:
                raise ValueError(f"Expecting {count} {name} but got {len(given)}")
        columns = args or [()] * count, kwargs or [{}] * count, targets or [None] * count
        return [Microbatch(*row, loss_kwargs) for row in zip(*columns, strict=True)]  # type: ignore[call-arg, call-overload]

    def _given(self, losses: object, read: Callable[[], Any], training: bool, return_outputs: bool | None = None) -> Any:
        """The batch, or microbatches, with absent tensors for data that only other ranks were given."""

        without_grad = training and not torch.is_grad_enabled()  # the exchange enables gradients

        def mine() -> bytes:
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses must be a list but got a {type(losses)}")
            if without_grad:
                raise RuntimeError(_NO_GRAD)
            if return_outputs and not self._return_outputs:
                raise GraphPPError(NO_OUTPUTS)
            return as_bytes(trees(read()), "the arguments of the schedule")

        others = [pickle.loads(each) for each in self._exchange(mine)]
        batch = read()
        parts = batch if isinstance(batch, list) else [batch]
        whole = [_filled(part, each) for part, *each in zip(parts, *others, strict=True)]
        return whole if isinstance(batch, list) else whole[0]

    def _returned(
        self, result: StepResult | EvalResult, losses: list[torch.Tensor] | None, output: bool | None = None
    ) -> Any:
        if self._pipe.is_last and losses is not None and result.losses is not None:
            losses[:] = result.losses.unbind()
        return None if output is False else result.output


def trees(batch: Microbatch | Sequence[Microbatch] | None) -> list[dict[str, Any]] | None:
    """The microbatches as dicts, which pickle; None without any."""
    if batch is None:
        return None
    parts = [batch] if isinstance(batch, Microbatch) else batch
    return [
        {"args": part.args, "kwargs": part.kwargs, "target": part.target, "loss_kwargs": part.loss_kwargs} for part in parts
    ]


def _filled(mine: Microbatch, ranks: Sequence[Mapping[str, Any]]) -> Microbatch:
    """`mine`, and where it lacks arguments or the target those of the first rank that has them, without data."""
    args = mine.args or next((rank["args"] for rank in ranks if rank["args"]), ())
    targets = [mine.target, *(rank["target"] for rank in ranks)]
    target = next((each for each in targets if each is not None), None)
    kwargs = _united(mine.kwargs, [rank["kwargs"] for rank in ranks])
    loss_kwargs = _united(mine.loss_kwargs, [rank["loss_kwargs"] for rank in ranks])
    return Microbatch(args, kwargs, target, loss_kwargs)


def _united(mine: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keyword arguments of all ranks, in one order, with this rank's values where it has them."""
    others = {name: value for rank in reversed(ranks) for name, value in rank.items()}
    return {name: mine.get(name, value) for name, value in others.items()}
