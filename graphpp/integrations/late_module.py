"""A model that becomes a pipeline's module once the pipeline has captured it, for loops that make their optimizer before.

Contract
--------
- Before the capture the module shows the model's own parameters, buffers and submodules, all of them; afterwards this rank's
  (`pipe.as_module`). Attributes that are read or set are the model's.
- An optimizer that was made of all parameters keeps this rank's from `keep_own` on: at the latest at its first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch
from torch import nn

import graphpp
from graphpp.errors import GraphPPError

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class LateModule(nn.Module):
    """`original`: the model. `pipe`: its pipeline, None before `become`."""

    original: nn.Module
    pipe: graphpp.Pipeline | None
    stepping: Any  # `pipe.as_module()`

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        vars(self).update(original=model, pipe=None, stepping=None, training=model.training)
        vars(self)["_before"] = {id(each): weakref.ref(each) for each in model.parameters()}
        self._show(model)

    def become(self, pipe: graphpp.Pipeline, loss_scale: float = 1.0) -> None:
        """Show the pipeline's part of the model from now on."""
        vars(self).update(pipe=pipe, stepping=pipe.as_module(loss_scale))
        pipe.let_optimizers_drop(each for ref in self._before.values() if (each := ref()) is not None)
        self._show(self.stepping)

    def _show(self, module: nn.Module) -> None:
        vars(self).update({store: vars(module)[store] for store in _SHARED})

    def keep_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the model hold this rank's parameters alone; do nothing before the capture.

        Raises `GraphPPError` for an optimizer that also holds parameters of other models.
        """
        if self.pipe is None:
            return
        own, whole = set(map(id, self.pipe.parameters())), set(map(id, self.original.parameters()))
        held = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
        foreign = [each for each in held if id(each) not in whole and self._before.get(id(each), lambda: None)() is not each]
        if foreign:
            raise GraphPPError(
                f"the optimizer holds {len(foreign)} parameters that are not the model's, the first of shape "
                f"{list(foreign[0].shape)}: make the optimizer of model.parameters() alone"
            )
        self.pipe.let_optimizers_drop(held, [optimizer])

    @property
    def _showing(self) -> nn.Module:
        shown: nn.Module = self.original if self.stepping is None else self.stepping
        return shown

    def train(self, mode: bool = True) -> Self:
        self._showing.train(mode)
        vars(self)["training"] = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._showing.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._showing.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self._showing.load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._showing._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "original" in vars(self):
            setattr(self.original, name, value)
        else:  # nn.Module is being made
            super().__setattr__(name, value)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Read by `DistributedDataParallel` when it is made."""
        raise GraphPPError(
            "DistributedDataParallel around a pipeline would average the gradients of different parameters: use the prepared "
            "model as it is"
        )
