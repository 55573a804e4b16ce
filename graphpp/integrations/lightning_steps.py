"""The steps of a LightningModule as the forward that a pipeline captures, and what they log.

Contract: while a step is captured, `self.log` and the calls of metrics note their arguments as outputs of the graph. After each
run of the graph `Steps.report` gives them to the module's own `log` and to the metrics. A training step notes numbers only, of
which a pipeline returns the means over the microbatches.
"""

from __future__ import annotations

import dis
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, NoReturn

import torch
from torchmetrics import Metric, MetricCollection

import graphpp
from graphpp.errors import GraphPPError

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_LOG_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "rank_zero_only")
_NUMBERS = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat)


class Steps:
    """The forward of a module in a pipeline: one of its steps by name. Returns the step's result and what it noted."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, held = module, vars(module)
        self._before = {name: held[name] for name in ("forward", *_STEPS) if name in held}
        self._indices = {name: _read_arguments(getattr(module, name)) for name in _STEPS}
        self._metrics = {path: each.to(device) for path, each in module.named_modules() if isinstance(each, Metric)}
        for metric in self._metrics.values():
            metric.sync_on_compute = False  # every rank has the whole state
            graphpp.unwatched(metric)
        for name in _STEPS:  # as attributes, so that graphpp watches what the code of a step reads
            held[name] = getattr(module, name)
        held["forward"] = self

    def remove(self) -> None:
        """Let the module be as it was before."""
        for name in ("forward", *_STEPS):
            vars(self._module).pop(name, None)
        vars(self._module).update(self._before)

    def arguments(self, name: str, batch: Any, indices: Sequence[int]) -> tuple[Any, ...]:
        """The arguments of a forward: the step's name, the batch, and the indices of batch and loader.

        An index that the step's code does not read is 0, for each distinct number would be captured.
        """
        read = self._indices[name]
        return name, batch, *(each if read is None or at in read else 0 for at, each in enumerate(indices, 1))

    def __call__(self, name: str, *args: Any) -> tuple[Any, dict[str, Any]]:
        if not isinstance(name, str) or name not in _STEPS:
            raise GraphPPError(
                "a LightningModule in a pipeline is not called directly, for each rank has a part of the parameters: compute "
                "in validation_step, test_step or predict_step"
            )
        notes = _Notes(name, {id(metric): path for path, metric in self._metrics.items()})
        with self._as_written(notes):
            result = getattr(self._module, name)(*args)
        return (notes.loss_of(result), notes.noted) if name == "training_step" else (result, notes.noted)

    @contextmanager
    def _as_written(self, notes: _Notes) -> Iterator[None]:
        """The module with its own forward, and with `notes` in place of its log and of the calls of its metrics."""
        module = self._module
        collections = [each for each in module.modules() if isinstance(each, MetricCollection)]
        inside = {id(metric) for each in collections for metric in each.values(copy_state=False)}
        own = self._before.get("forward", MethodType(type(module).forward, module))
        with ExitStack() as stack:
            stack.enter_context(_replaced(vars(module), {"forward": own, "log": notes.log}))
            for path, each in module.named_modules():
                if isinstance(each, Metric | MetricCollection) and id(each) not in inside:
                    calls = {call: notes.metric_call(path, call) for call in ("forward", "update")}
                    stack.enter_context(_replaced(vars(each), calls))
            yield

    def report(self, noted: Mapping[str, Any], microbatches: int = 1) -> dict[str, Any]:
        """Log and call metrics as the step did. Returns the numbers that a training step returned beside the loss."""
        values, returned, sizes = dict[str, Any](), dict[str, Any](), dict[str, int]()
        for key, value in noted.items():
            kind, name, *more = json.loads(key)
            if kind == "metric":
                args, kwargs = value
                values[name] = getattr(self._module.get_submodule(name), more[0])(*args, **kwargs)
            elif kind == "returned":
                returned[name] = value
            elif kind == "size":
                sizes[name] = round(float(value) * microbatches)
            else:
                settings, of = more
                number = value if of is None else values[of[0]] if of[1] else self._metrics[of[0]]
                self._module.log(name, number, batch_size=sizes.pop(name, None), **settings)
        return returned


class _Pending:
    """The value of a metric, which is known after the step: to be logged, and no more."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _compute(self, *_: Any) -> NoReturn:
        raise GraphPPError(
            f"{self.path}: a step that is captured calls its metrics afterwards, so it cannot compute with a metric's value: "
            "log the metric, or use the functional form of the metric"
        )

    __getattr__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _compute
    __float__ = __bool__ = __gt__ = __lt__ = __ge__ = __le__ = _compute


class _Notes:
    """The numbers that a step logs and the calls of its metrics, by JSON texts. `paths`: of the metrics by `id`."""

    def __init__(self, step: str, paths: Mapping[int, str]) -> None:
        self.noted: dict[str, Any] = {}
        self._step, self._training, self._paths = step, step == "training_step", paths

    def log(self, name: str, value: Any, *args: Any, batch_size: Any = None, **named: Any) -> None:
        """`LightningModule.log`."""
        named |= dict(zip(_LOG_ARGUMENTS, args, strict=False))
        settings = {key: each for key, each in named.items() if key in _LOG_ARGUMENTS}
        reduced, of = settings.get("reduce_fx", "mean"), None
        if isinstance(value, _Pending | Metric) and not self._training:
            of = [value.path, True] if isinstance(value, _Pending) else [self._paths[id(value)], False]
        elif not isinstance(value, _NUMBERS):
            found = type(value).__name__
            raise GraphPPError(f"self.log({name!r}, ..) in {self._step} got a {found}: log a tensor with one number")
        if reduced not in ("mean", "sum", "min", "max") or (self._training and reduced != "mean"):
            raise GraphPPError(
                f"self.log({name!r}, .., reduce_fx={reduced!r}) in {self._step}: a training step logs the mean over its "
                'microbatches: leave reduce_fx out, or log in validation_step with "sum", "min" or "max"'
            )
        if batch_size is not None:
            self.noted[json.dumps(["size", name])] = batch_size
        self.noted[json.dumps(["log", name, settings, of])] = value if of is None else 0

    def metric_call(self, path: str, call: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> _Pending:
            if self._training:
                raise GraphPPError(
                    f"training_step calls the metric {path}, which keeps a state, and a pipeline returns only numbers of a "
                    "training step: log the functional form of the metric, or call the metric in validation_step"
                )
            self.noted[json.dumps(["metric", path, call, len(self.noted)])] = args, kwargs
            return _Pending(path)

        return note

    def loss_of(self, result: Any) -> Any:
        """The loss that a `training_step` returned; further numbers are noted."""
        if result is None:
            raise GraphPPError("training_step returned None: a pipeline runs every batch, so return the loss")
        if not isinstance(result, Mapping):
            return result
        for key, value in result.items():
            if key != "loss" and isinstance(value, torch.Tensor) and value.numel() != 1:
                shape = list(value.shape)
                raise GraphPPError(
                    f"training_step returned {key!r} of shape {shape} beside the loss, and a pipeline returns only numbers of "
                    "a training step: reduce the tensor, or compute with it in validation_step"
                )
            if key != "loss":
                self.noted[json.dumps(["returned", key])] = value.detach() if isinstance(value, torch.Tensor) else value
        return result["loss"]


@contextmanager
def _replaced(held: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values:
            del held[name]
        held.update(before)


def _read_arguments(step: Any) -> frozenset[int] | None:
    """The positions, from 0 after `self`, of the parameters that a method's code reads; None if that cannot be told."""
    code = getattr(getattr(step, "__func__", None), "__code__", None)
    if code is None or {"locals", "vars", "eval", "exec"} & set(code.co_names) or code.co_flags & inspect.CO_VARARGS:
        return None
    named = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_")]
    read = {name for each in named for name in (each if isinstance(each, tuple) else (each,))}.union(code.co_cellvars)
    return frozenset(at for at, name in enumerate(code.co_varnames[1 : code.co_argcount]) if name in read)


def loss_of_step(output: tuple[Any, dict[str, Any]], training: bool) -> tuple[Any, dict[str, Any]]:
    return output
