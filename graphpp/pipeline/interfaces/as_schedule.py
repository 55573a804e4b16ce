"""`pipe.as_schedule()`: a pipeline behind the interface of the schedules of `torch.distributed.pipelining`.

Contract
--------
- The calls are those of torch's schedule objects: the rank of the first stage gives the model's arguments, the rank of the last
  stage the targets; other ranks may give nothing. The data are a whole batch, or lists with an entry for each microbatch, on
  all ranks. In each call the ranks exchange the shapes and plain data that were given.
- The rank of the last stage gets the losses (in the caller's list, one per microbatch) and the output of the whole batch.
- `step` accumulates gradients as `pipe.step`: their mean over the microbatches, or their sum for `gradients="sum"`, as
  `scale_grads` says. `eval` is `pipe.eval`, in eval mode whatever the flags of the modules.
- Errors in the arguments have the type that torch raises (`TypeError`, `ValueError`, `RuntimeError`) on the rank that made
  them, and are a `MismatchError` on the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphpp.batch.microbatch import Microbatch
from graphpp.errors import GraphPPError, MismatchError
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
    eval_microbatches: Callable[..., EvalResult]


class TorchSchedule:
    """A pipeline with the methods of a schedule object of `torch.distributed.pipelining`."""

    def __init__(
        self, pipe: Calls, exchange: Exchange, scale_grads: bool, return_outputs: bool, loss_weight: float | None
    ) -> None:
        self._pipe, self._exchange, self._return_outputs, self._weight = pipe, exchange, return_outputs, loss_weight
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
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """A training step; returns its output on the rank of the last stage, None elsewhere.

        `args`, `kwargs`, `target`: the whole batch; or `arg_mbs`, `kwarg_mbs`, `target_mbs`: lists with an entry for each
        microbatch. `finalize_gradients` has no effect: the gradients of each step are complete.
        """
        lists = _Lists(arg_mbs, kwarg_mbs, target_mbs)
        data = self._united(losses, Microbatch(args, kwargs, target, loss_kwargs or {}), lists, True, return_outputs)
        if isinstance(data, list):
            return self._returned(self._pipe.step_microbatches(data, loss_weight=self._weight), losses, return_outputs)
        loss = {"target": data.target, "loss_weight": self._weight, "loss_kwargs": data.loss_kwargs}
        return self._returned(self._pipe.step(*data.args, **loss, **data.kwargs), losses, return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """An evaluation; returns its output on the rank of the last stage, None elsewhere. Takes the data as `step` does."""
        lists = _Lists(arg_mbs, kwarg_mbs, target_mbs)
        data = self._united(losses, Microbatch(args, kwargs, target, loss_kwargs or {}), lists, False)
        if isinstance(data, list):
            return self._returned(self._pipe.eval_microbatches(data), losses)
        result = self._pipe.eval(*data.args, target=data.target, loss_kwargs=data.loss_kwargs, **data.kwargs)
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
        lists: dict[str, Any] = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        if not any(given is not None for given in lists.values()):
            lists["kwarg_mbs"] = [{}] * self._n_microbatches
        return self.step(losses=losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs, **lists)

    def _united(
        self, losses: object, batch: Microbatch, lists: _Lists, training: bool, return_outputs: bool | None = None
    ) -> Microbatch | list[Microbatch]:
        """The batch, or the microbatches, with absent tensors for data that only other ranks were given."""

        without_grad = training and not torch.is_grad_enabled()  # the exchange enables gradients

        def mine() -> bytes:
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses must be a list but got a {type(losses)}")
            if without_grad:
                raise RuntimeError(_NO_GRAD)
            if return_outputs and not self._return_outputs:
                raise GraphPPError(NO_OUTPUTS)
            if lists.given:
                lists.check(batch, self._n_microbatches)
            parts = lists.microbatches(batch) if lists.given else [batch]
            return as_bytes((lists.given, trees(parts)), "the arguments of the schedule")

        ranks = [pickle.loads(each) for each in self._exchange(mine)]
        if not any(in_lists for in_lists, _ in ranks):
            return _filled(batch, [given[0] for _, given in ranks])
        if any(_has_data(given[0]) for in_lists, given in ranks if not in_lists):
            raise MismatchError("one rank gives lists of microbatches and another one a whole batch: let all ranks give lists")
        count = self._n_microbatches
        parts = lists.microbatches(batch) if lists.given else [batch] * count
        columns = [given if in_lists else given * count for in_lists, given in ranks]
        return [_filled(part, each) for part, *each in zip(parts, *columns, strict=True)]

    def _returned(
        self, result: StepResult | EvalResult, losses: list[torch.Tensor] | None, output: bool | None = None
    ) -> Any:
        if self._pipe.is_last and losses is not None and result.losses is not None:
            losses[:] = result.losses.unbind()
        return None if output is False else result.output


@dataclass(frozen=True)
class _Lists:
    """The arguments, keyword arguments and targets of the microbatches, in a list each; a rank may lack each list."""

    arg_mbs: list[Any] | None
    kwarg_mbs: list[Any] | None
    target_mbs: list[Any] | None

    @property
    def given(self) -> bool:
        return any(each is not None for each in vars(self).values())

    def check(self, batch: Microbatch, count: int) -> None:
        """Raise as torch does for a list that is none or has not `count` entries, and for a batch beside lists."""
        for name, given in vars(self).items():
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list but got a {type(given)}")
            if given is not None and len(given) != count:
                raise ValueError(f"Expecting {count} {name} but got {len(given)}")
        if batch.args or batch.kwargs or batch.target is not None:
            raise ValueError("arg_mbs, kwarg_mbs and target_mbs have the data of all microbatches: give no other arguments")

    def microbatches(self, batch: Microbatch) -> list[Microbatch]:
        """The microbatches, with the `loss_kwargs` of the batch."""
        count = max(len(given) for given in vars(self).values() if given is not None)
        columns = self.arg_mbs or [()] * count, self.kwarg_mbs or [{}] * count, self.target_mbs or [None] * count
        return [Microbatch(*row, batch.loss_kwargs) for row in zip(*columns, strict=True)]


def _has_data(tree: Mapping[str, Any]) -> bool:
    return bool(tree["args"] or tree["kwargs"]) or tree["target"] is not None


def trees(parts: Sequence[Microbatch]) -> list[dict[str, Any]]:
    """The microbatches as dicts, which pickle."""
    return [
        {"args": part.args, "kwargs": part.kwargs, "target": part.target, "loss_kwargs": part.loss_kwargs} for part in parts
    ]


def _filled(mine: Microbatch, ranks: Sequence[Mapping[str, Any]]) -> Microbatch:
    """`mine`, and where it lacks arguments or the target those of the first rank that has them, without data."""
    args = mine.args or next((rank["args"] for rank in ranks if rank["args"]), ())
    targets = [mine.target, *(rank["target"] for rank in ranks)]
    target = next((each for each in targets if each is not None), None)
    kwargs = _all_named(mine.kwargs, [rank["kwargs"] for rank in ranks])
    loss_kwargs = _all_named(mine.loss_kwargs, [rank["loss_kwargs"] for rank in ranks])
    return Microbatch(args, kwargs, target, loss_kwargs)


def _all_named(mine: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keyword arguments of all ranks, in one order, with this rank's values where it has them."""
    others = {name: value for rank in reversed(ranks) for name, value in rank.items()}
    return {name: mine.get(name, value) for name, value in others.items()}
