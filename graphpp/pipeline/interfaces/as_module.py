"""`pipe.as_module()`: a pipeline as an `nn.Module` whose loss has a backward, for loops with forward and backward apart.

Contract
--------
- In train mode `module(*args, target=..., **kwargs)` runs the whole step of `pipe.step`, and keeps its gradients apart from
  `param.grad`. `output.loss.backward()` adds them, times the gradient of the loss: a loop may scale the loss, accumulate, and
  call `zero_grad` between forward and backward. Without gradients in place nothing is copied.
- The seeds of a step have the factor of the last backward (1 / accumulation steps, the scale of a `GradScaler`), so gradients
  round as in a loop that scales its loss; the step before the first backward has the factor `loss_scale`.
- In train mode without gradients (`torch.no_grad`) the gradients of the step are dropped. In eval mode the module runs
  `pipe.eval`; the backward of its loss raises `GraphPPError`.
- The module holds this rank's parameters and buffers under their FQNs in the model. `train`, `eval` and `requires_grad_` set
  the flags of the model; `state_dict` and `load_state_dict` are the pipeline's; a change of device or dtype raises
  `GraphPPError`; other attributes, such as `config`, are the model's.
- All ranks call the module and the backward alike; an overflow of one rank is every rank's once a loss was scaled up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import nn

from graphpp._torch import pytree
from graphpp.batch.loss_weights import LossArguments, LossWeight
from graphpp.batch.microbatch import Microbatch, whole_each
from graphpp.capture.outputs import Unseen
from graphpp.errors import GraphPPError
from graphpp.pipeline.interfaces.step_gradients import StepGradients
from graphpp.pipeline.rank_part import RankPart
from graphpp.pipeline.results import EvalResult, StepResult

Step = Callable[[Microbatch, LossArguments], tuple[StepResult, StepGradients]]
Evaluate = Callable[..., EvalResult]
Deliver = Callable[[StepGradients, float, bool], None]

_DDP = (
    "DistributedDataParallel around a pipeline would average the gradients of different parameters: use the module as it is, "
    "with dp_replicate in the mesh= of graphpp.compile for replicas"
)
_RESULTS = (
    "backward: a value of the module's output other than `loss`, such as `logits` or `losses`, has no gradients here: let the "
    "loss of graphpp.compile compute all terms, or detach the value"
)
_EVAL = "backward: the module was in eval mode, where it computes no gradients: call module.train() before the forward"


class ModuleOutput(dict[str, Any]):
    """The results of a call, by key and by attribute.

    `loss`, `losses`, `metrics`, `output`: as in `StepResult` and `EvalResult`, and the fields of an output that is a mapping,
    a dataclass or a named tuple, such as `logits`.
    """

    def __missing__(self, key: object) -> NoReturn:
        raise KeyError(self._lacks(key))

    def _lacks(self, key: object) -> str:
        return (
            f"the output has {', '.join(self)}, and no {key!r} on this rank: `output` is the model's own, on the rank of the "
            "last stage, and in train mode with memory=graphpp.Memory(outputs=True)"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._lacks(name)) from None


class _Result(torch.autograd.Function):
    """A result of a step that is not its loss; its backward raises."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        raise GraphPPError(_RESULTS)


class _Loss(torch.autograd.Function):
    """The loss of a step; its backward calls `backward` with the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, backward: Callable[[float], None]) -> torch.Tensor:
        ctx.own = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        if torch.is_grad_enabled():
            raise GraphPPError("backward: create_graph=True: the gradients of a pipeline have no graph of their own")
        ctx.own(gradient.item())
        return None, None, None


class _Place(NamedTuple):
    """The name of a tensor in a dict of a module, and its FQN."""

    store: dict[str, torch.Tensor]
    name: str
    tensor: torch.Tensor
    fqn: str


class _Tree(nn.Module):
    """This rank's tensors of a module of the model, and of the modules in it; flags and other attributes are the module's."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"], self.training = original, original.training  # no submodule: it has all ranks' parameters

    def train(self, mode: bool = True) -> Self:
        self.__dict__["_original"].train(mode)
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.__dict__["_original"].requires_grad_(requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


class _Part(_Tree):
    """The tree of a submodule, which `isinstance` takes for the submodule: rules of weight decay ask for `nn.LayerNorm`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]
        return type(self.__dict__["_original"])


class _DictPart(_Part, nn.ModuleDict):
    """A part whose `keys`, `values` and `items` are those of this rank; a key of another rank gives the model's module."""

    def __getitem__(self, key: str) -> nn.Module:
        return getattr(self, key)  # type: ignore[no-any-return]


class _ListPart(_Part, nn.ModuleList):
    """A part that iterates over the modules of this rank; an index of another rank gives the model's module."""

    def __getitem__(self, index: Any) -> Any:
        names = [name for name, _ in self.__dict__["_original"].named_children()][index]
        return [getattr(self, name) for name in names] if isinstance(index, slice) else getattr(self, names)


class PipelineModule(_Tree):
    """A pipeline as a module; made by `pipe.as_module()`."""

    def __init__(
        self, pipe: RankPart, model: nn.Module, step: Step, evaluate: Evaluate, deliver: Deliver, loss_scale: float
    ) -> None:
        super().__init__(model)
        self._pipe, self._step, self._eval, self._deliver = pipe, step, evaluate, deliver
        self._factor, self._scaled = float(loss_scale), loss_scale > 1
        self._anchor = [torch.zeros((), requires_grad=True)]  # a list: no parameter
        self._held: list[torch.Tensor] = []
        self._places: list[_Place] = []
        self._hold()

    def forward(
        self,
        *args: Any,
        target: Any = None,
        loss_weight: LossWeight | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> ModuleOutput:
        """Run a batch, as `pipe.step` in train mode and as `pipe.eval` in eval mode."""
        self._hold()
        if not self.training:
            return self._evaluate(*args, target=target, loss_weight=loss_weight, loss_kwargs=loss_kwargs, **kwargs)
        factor, batch = self._factor, Microbatch(args, kwargs, target, whole_each(loss_kwargs))
        result, gradients = self._step(batch, LossArguments(loss_weight, factor=factor))
        loss = result.loss
        if torch.is_grad_enabled():
            losses, metrics, output = pytree.tree_map(self._guarded, (result.losses, dict(result.metrics), result.output))
            result = StepResult(loss, losses, metrics, output)
            loss = self._with_backward(loss, lambda gradient: self._backward(gradients, factor, gradient))
        return _output(result, loss)

    def _guarded(self, leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return _Result.apply(*self._anchor, leaf) if is_float else leaf  # type: ignore[no-untyped-call]

    def _with_backward(self, loss: torch.Tensor, backward: Callable[[float], None]) -> torch.Tensor:
        return _Loss.apply(*self._anchor, loss, backward)  # type: ignore[no-untyped-call, no-any-return]

    def _backward(self, gradients: StepGradients, used: float, factor: float) -> None:
        self._factor = factor if factor and math.isfinite(factor) else 1.0  # a seed of nan would spoil the next step
        self._scaled = self._scaled or factor > 1
        self._deliver(gradients, factor / used, self._scaled)

    def _evaluate(self, *args: Any, **kwargs: Any) -> ModuleOutput:
        result = self._eval(*args, **kwargs)
        loss = result.loss
        if loss is not None and torch.is_grad_enabled():
            loss = self._with_backward(loss, _refuse_backward)
        return _output(result, loss)

    def _hold(self) -> None:
        """Register this rank's parameters and buffers under all their FQNs, unless they are registered already.

        Raises `GraphPPError` if the caller has replaced one in this tree: the pipeline would train the tensor of before.
        """
        for place in self._places:
            if place.store.get(place.name) is not place.tensor:
                raise GraphPPError(
                    f"{place.fqn} was replaced in the pipeline's module, and the pipeline trains the old tensor: change the "
                    "model before graphpp.compile, or copy values by module.load_state_dict"
                )
        held = [*self._pipe.parameters(), *self._pipe.buffers()]
        if len(held) == len(self._held) and all(new is old for new, old in zip(held, self._held, strict=True)):
            return
        for store in (self._modules, self._parameters, self._buffers):
            store.clear()
        self._held, own, model = held, set(map(id, held)), self.__dict__["_original"]
        parameters = [(*each, "_parameters") for each in model.named_parameters(remove_duplicate=False)]
        buffers = [(*each, "_buffers") for each in model.named_buffers(remove_duplicate=False)]
        self._places = [self._registered(*each) for each in (*parameters, *buffers) if id(each[1]) in own]

    def _registered(self, fqn: str, tensor: torch.Tensor, store: str) -> _Place:
        place = _Place(vars(self._owner(fqn))[store], fqn.rpartition(".")[2], tensor, fqn)
        place.store[place.name] = tensor
        return place

    def _owner(self, fqn: str) -> nn.Module:
        """The module of this tree that has the tensor `fqn`, made if need be."""
        module: nn.Module = self
        for name in fqn.split(".")[:-1]:
            if name not in module._modules:
                module._modules[name] = _part_of(module.__dict__["_original"].get_submodule(name))
            module = module._modules[name]  # type: ignore[assignment]
        return module

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """This rank's entries of the model's state dict, as `pipe.state_dict`."""
        entries: dict[str, Any] = {} if destination is None else destination
        for key, value in self._pipe.state_dict().items():
            entries[prefix + key] = value.detach() if isinstance(value, torch.Tensor) and not keep_vars else value
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """As `pipe.load_state_dict`, which returns nothing: values are copied, so `assign=True` is refused."""
        if assign:
            raise GraphPPError("load_state_dict: assign=True would replace parameters that the pipeline trains: leave it out")
        self._pipe.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PipelineModule:
        """Called by `to`, `cuda`, `half` and the like. Raises `GraphPPError` for another device or dtype."""
        for kind in {(tensor.device, tensor.dtype) for tensor in self._held}:
            made: torch.Tensor = fn(torch.empty(0, device=kind[0], dtype=kind[1]))
            if (made.device, made.dtype) != kind:
                raise GraphPPError(
                    f"a pipeline has its tensors on {kind[0]} in {kind[1]}, and cannot move them to {made.device} in "
                    f"{made.dtype}: change the model's dtype before graphpp.compile, and give it parallel=Parallel(device=)"
                )
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Read by `DistributedDataParallel` when it is made."""
        raise GraphPPError(_DDP)


def _part_of(original: nn.Module) -> _Part:
    kinds = {nn.ModuleDict: _DictPart, nn.ModuleList: _ListPart}
    return next((part for kind, part in kinds.items() if isinstance(original, kind)), _Part)(original)


def _output(result: StepResult | EvalResult, loss: torch.Tensor | None) -> ModuleOutput:
    of_call = {"loss": loss, "losses": result.losses, "metrics": result.metrics, "output": result.output}
    return ModuleOutput({**_fields(result.output), **of_call})


def _fields(output: Any) -> dict[str, Any]:
    """The fields of an output that has names for them; those of Hugging Face's classes are mappings without None."""
    if is_dataclass(output) and not isinstance(output, Unseen):
        own = {each.name: getattr(output, each.name) for each in fields(output)}
    else:
        own = {name: getattr(output, name) for name in getattr(output, "_fields", ()) if isinstance(output, tuple)}
    return {**own, **output} if isinstance(output, Mapping) else own


def _refuse_backward(gradient: float) -> NoReturn:
    raise GraphPPError(_EVAL)
