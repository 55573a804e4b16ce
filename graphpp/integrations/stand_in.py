"""Stand-ins for a model in a trainer's function that calls the model and computes the loss in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from graphpp.errors import GraphPPError


class _ModelCall(BaseException):
    """The arguments that a trainer's function gives to the model; no `except Exception` catches it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


class StandIn:
    """Takes the model's place in a trainer's function: calls run `call`, attributes are the model's."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def call_of(model: Any, name: str, function: Callable[[StandIn], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and named arguments of the first call of the model in `function(model)`, which ends there.

    Raises `GraphPPError`, which names the function `name`, if it does not call the model.
    """

    def ask(*args: Any, **kwargs: Any) -> NoReturn:
        raise _ModelCall(args, kwargs)

    try:
        function(StandIn(model, ask))
    except _ModelCall as call:
        return call.args, call.kwargs
    raise GraphPPError(f"{name} does not call the model, so there is nothing to run")


def answering(model: Any, output: Any, name: str) -> StandIn:
    """A stand-in whose call returns `output`. A second call raises `GraphPPError`, which names the function: `name`."""
    calls: list[None] = []

    def answer(*_: Any, **__: Any) -> Any:
        calls.append(None)
        if len(calls) > 1:
            raise GraphPPError(f"{name} calls the model more than once, and a pipeline runs one forward a microbatch")
        return output

    return StandIn(model, answer)


def tensors_with_rows(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}


def rows_of(inputs: Mapping[str, Any]) -> int:
    """The rows of a batch: the first dimension of its first tensor; 0 without one."""
    return next((len(value) for value in tensors_with_rows(inputs).values()), 0)
