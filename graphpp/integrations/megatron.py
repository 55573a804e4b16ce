"""Megatron-Core's `forward_backward_func` over a pipeline, for loops with a `forward_step_func`.

Contract
--------
- `model = MegatronModel(model, pipeline={..options of graphpp.compile..})`; `get_forward_backward_func()` returns the function,
  whose arguments and results are those of `megatron.core.pipeline_parallel.schedules`. Megatron-Core need not be installed.
- `forward_step_func(data_iterator, model) -> (output, loss_func)` and its `loss_func(output) -> (loss, dict)` or
  `(loss, num_tokens, dict)` are captured with the model at the first call. In each step the function is called for the data
  that it takes and the arguments that it gives to the model; in the capture on traced values: it calls the model once, takes
  its data from `data_iterator`, and reads no values of tensors.
- The loss of a step is the mean over the microbatches, each divided by its `num_tokens` if there are any, or with
  `model.config.calculate_per_token_loss` the sum of losses divided by the sum of tokens.
- The list of reported dicts, one for each microbatch, is on the rank of the last stage; other ranks get an empty list. A rank
  whose `data_iterator` is None gets the data that its stages read from a rank that has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import graphpp
from graphpp.errors import GraphPPError
from graphpp.integrations.late_module import LateModule
from graphpp.integrations.refusals import PLAN_OPTION, faults_of_model, faults_of_options, refuse
from graphpp.integrations.stand_in import answering, call_of

ForwardStep = Callable[..., Any]
_OWNER = "forward_backward_func"
_OWN_OPTIONS = {
    "gradients": "loss_func and model.config.calculate_per_token_loss say how losses are reduced",
    "microbatches": "num_microbatches= of each call says so",
    "example": "give forward_step_func= and example= to MegatronModel",
    "plan": PLAN_OPTION,
}
_SYNCS = ("finalize_model_grads_func", "grad_sync_func", "param_sync_func", "no_sync_func")
_LARGEST = 256  # numbers in a reported tensor
_TOKENS = ""  # the name under which num_tokens is reported


class MegatronModel(LateModule):
    """A model for `forward_backward_func`; `pipe` is its pipeline after the first call.

    An optimizer that was made of `parameters()` before the first call keeps this rank's from its first step on.
    `forward_step_func`, `example`: the function, and one item of its `data_iterator`, to capture at once; then `parameters()`
    are this rank's, and `pipe.checkpoint(optimizer).load(..)` works before the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Mapping[str, Any] | None = None,
        *,
        forward_step_func: ForwardStep | None = None,
        example: Any = None,
    ) -> None:
        refuse(_OWNER, {**faults_of_model(model), **faults_of_options(pipeline or {}, _OWN_OPTIONS)})
        super().__init__(model)
        vars(self).update(_options=dict(pipeline or {}), _captured=None)
        if forward_step_func is not None:
            self.pipeline_of(forward_step_func, _microbatch(forward_step_func, iter([example]), model))
            self.begin()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphPPError("a MegatronModel runs in forward_backward_func: call the model in forward_step_func alone")

    @property
    def per_token(self) -> bool:
        return bool(_setting(self.original, "calculate_per_token_loss"))

    def pipeline_of(self, function: ForwardStep, example: graphpp.Microbatch | None = None) -> graphpp.Pipeline:
        """The pipeline with the losses of a `forward_step_func`. Raises `GraphPPError` for another function than before."""
        known: _Captured | None = vars(self)["_captured"]
        if known is None:
            loss = _Loss(function, self.original, self.per_token)
            options = {"gradients": "sum" if self.per_token else "mean", "example": example, **vars(self)["_options"]}
            known = _Captured(graphpp.compile(self.original, loss.of, **options), function, self.per_token)
            vars(self)["_captured"] = known
        if (known.function, known.per_token) != (function, self.per_token):
            raise GraphPPError(
                f"forward_step_func: the pipeline has the losses of {known.function}, and this call gives {function} or "
                "another calculate_per_token_loss: define one function outside of the loop, for training and evaluation"
            )
        return known.pipe

    def begin(self) -> None:
        """Show this rank's parameters, after the capture."""
        if self.pipe is None:
            self.become(vars(self)["_captured"].pipe)


class _Captured(NamedTuple):
    pipe: graphpp.Pipeline
    function: ForwardStep
    per_token: bool


class _Loss:
    """The loss of one microbatch, captured with the model: `forward_step_func` and its loss_func on the model's output."""

    def __init__(self, function: ForwardStep, model: nn.Module, per_token: bool) -> None:
        self._function, self._model, self._per_token = function, model, per_token

    def of(self, output: Any, drawn: Sequence[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        result, loss_func = self._function(iter(drawn), answering(self._model, output, "forward_step_func"))
        loss, *tokens, reported = loss_func(result)
        if self._per_token and not tokens:
            raise GraphPPError("loss_func: calculate_per_token_loss needs (loss, num_tokens, dict), got (loss, dict)")
        if tokens:
            reported = {**reported, _TOKENS: tokens[0]}
        if tokens and not self._per_token:
            loss = loss / torch.as_tensor(tokens[0]).clamp(min=1)
        return loss, {key: number for name, value in reported.items() for key, number in _numbers(name, value)}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The numbers of a reported value, each with a key: its name, its position in a tuple, the shape, and its index."""
    parts = list(enumerate(value)) if isinstance(value, tuple | list) else [(None, value)]
    for position, part in parts:
        tensor = torch.as_tensor(part).detach()
        if tensor.numel() > _LARGEST:
            raise GraphPPError(f"loss_func reports {name!r} of {tensor.numel()} numbers: reduce it to at most {_LARGEST}")
        for at, number in enumerate(tensor.reshape(-1).unbind()):
            yield json.dumps([name, position, list(tensor.shape), at]), number


def _reported(values: Mapping[str, torch.Tensor], index: int) -> dict[str, Any]:
    """The dict that loss_func reported for microbatch `index`, from the numbers of all."""
    numbers: dict[tuple[str, int | None], list[torch.Tensor]] = {}
    shapes: dict[tuple[str, int | None], list[int]] = {}
    for key, column in values.items():
        name, position, shape, _ = json.loads(key)
        numbers.setdefault((name, position), []).append(column[index])
        shapes[name, position] = shape
    found: dict[str, Any] = {}
    for (name, position), each in numbers.items():
        tensor = torch.stack(each).reshape(shapes[name, position])
        found[name] = tensor if position is None else (*found.get(name, ()), tensor)
    found.pop(_TOKENS, None)
    return found


class _Draws:
    """The data iterator, with a list of the items that were taken."""

    def __init__(self, data: Iterator[Any]) -> None:
        self._data, self.drawn = data, list[Any]()

    def __iter__(self) -> _Draws:
        return self

    def __next__(self) -> Any:
        self.drawn.append(next(self._data))
        return self.drawn[-1]


def _microbatch(function: ForwardStep, data: Iterator[Any], model: nn.Module) -> graphpp.Microbatch:
    """The model's arguments, and the data that the function took as the target."""
    draws = _Draws(data)
    args, kwargs = call_of(model, "forward_step_func", lambda model: function(draws, model))
    if not draws.drawn:
        raise GraphPPError(
            "forward_step_func took nothing from data_iterator, so its data would be constants of the captured loss: take "
            "them from data_iterator"
        )
    return graphpp.Microbatch(args, kwargs, tuple(draws.drawn))


def get_forward_backward_func(*_: Any, **__: Any) -> Callable[..., list[dict[str, Any]]]:
    """As Megatron-Core's function of this name; the arguments, which name a pipeline's layout, are those of `pipeline=`."""
    return forward_backward_func


def forward_backward_func(  # noqa: PLR0913 - Megatron-Core's signature
    *,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Any = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[dict[str, Any]]:
    """Run `num_microbatches`, and with `forward_only` no backward, in eval mode. Called by all ranks.

    `seq_length`, `micro_batch_size`, `decoder_seq_length` and `first_val_step` are not needed: messages have the shapes of the
    captured values. Returns what loss_func reported for each microbatch, on the rank of the last stage.
    """
    late, data = _only(model, "model"), _only(data_iterator, "data_iterator")
    others = {"adjust_tensor_shapes_fn": adjust_tensor_shapes_fn, "p2p_communicator": p2p_communicator}
    _refuse_call(late, {**others, "pg_collection": pg_collection}, collect_non_loss_data)
    pipe = late.pipeline_of(forward_step_func)
    with pipe.together(_OWNER):
        own = None if data is None else [_microbatch(forward_step_func, data, late.original) for _ in range(num_microbatches)]
    parts = pipe.shared_microbatches(own)
    result = pipe.eval_microbatches(parts) if forward_only else _trained(late, pipe, parts)
    late.begin()
    return [_reported(result.metric_values, at) for at in range(len(parts))] if pipe.is_last else []


def _trained(late: MegatronModel, pipe: graphpp.Pipeline, parts: Sequence[graphpp.Microbatch]) -> graphpp.StepResult:
    if not late.per_token:
        return pipe.step_microbatches(parts)
    parameters = list(late.original.parameters() if late.pipe is None else pipe.parameters())
    before = {each: each.grad for each in parameters if each.grad is not None}
    for each in before:
        each.grad = None
    result = pipe.step_microbatches(parts)
    tokens = sum(column.sum() for key, column in result.metric_values.items() if json.loads(key)[0] == _TOKENS)
    for each in pipe.parameters():
        if each.grad is not None:
            each.grad.div_(torch.as_tensor(tokens).clamp(min=1))  # without a token the gradients are zero
        if each in before:
            each.grad = before[each] if each.grad is None else before[each].add_(each.grad)
    return result


def _only(given: Any, name: str) -> Any:
    """The only entry of a list, or what is no list."""
    if isinstance(given, list | tuple):
        if len(given) != 1:
            raise GraphPPError(f"{name}: a list of {len(given)}, and graphpp cuts the model itself: give one for the model")
        return given[0]
    return given


def _setting(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)


def _refuse_call(model: Any, others: Mapping[str, Any], collect: bool) -> None:
    if not isinstance(model, MegatronModel):
        raise GraphPPError(f"model: give a MegatronModel, got {type(model).__name__}: MegatronModel(model, pipeline={{..}})")
    scale = _setting(model.original, "grad_scale_func")
    scales = scale is not None and float(scale(torch.ones(()))) != 1
    names = {name: "leave it None, for the pipeline sends messages and sums gradients itself, as pipeline= says"
             for name, value in others.items() if value is not None}
    syncs = {f"config.{name}": "leave it None, for the pipeline sums gradients itself, as mesh= says"
             for name in _SYNCS if _setting(model.original, name) is not None}
    remedy = "the scale of a GradScaler is not applied: train in bf16, or call pipe.step_microbatches(scaler=)"
    collected = "call pipe.eval_microbatches for the model's output" if collect else ""
    refuse(_OWNER, {**names, **syncs, "config.grad_scale_func": remedy * scales, "collect_non_loss_data": collected})
