"""accelerate's loop on a pipeline: `Accelerator(..)` becomes `PipelineAccelerator(.., pipeline={..})`.

Contract
--------
- `pipeline`: options of `graphpp.compile`. All ranks are one pipeline and read the same batches, in the order of one process;
  `gather`, `reduce` and `num_processes` are those of one process.
- `loss`: for a model that returns no loss; then `model(x, target=y)` returns it. None: the output's own `.loss`.
- A call of the model in train mode runs a whole step of the pipeline over its batch; `backward` adds the gradients. The model
  is captured at its first call, or with `pipeline={"example": ..}` by `prepare`. An optimizer that was made of
  `model.parameters()` before keeps this rank's parameters.
- A call in eval mode runs the batch whole, and every rank gets the model's output.
- `save_state` writes accelerate's files, and model and optimizers by `pipe.checkpoint` into the folder `graphpp`, which any
  number of ranks and any split loads. A load before the first call takes effect on the parameters at the first call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.checkpointing import load_accelerator_state  # type: ignore[import-untyped]
from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]

import graphpp
from graphpp.errors import CheckpointError, GraphPPError
from graphpp.integrations.accelerate_settings import OWNER, refuse_arguments
from graphpp.integrations.late_module import LateModule
from graphpp.integrations.loaders import prepared_loader, rows_of_data
from graphpp.integrations.refusals import PLAN_OPTION, faults_of_model, faults_of_options, refuse

_FOLDER = "graphpp"
_HOOK = "save_state keeps the model in pipe.checkpoint: save further files after save_state, or by register_for_checkpointing"


class PipelinedModel(LateModule):
    """The module that `PipelineAccelerator.prepare` returns for a model: a call runs a step, or in eval mode an evaluation."""

    def __init__(self, model: torch.nn.Module, run: Callable[..., Any]) -> None:
        super().__init__(model)
        vars(self)["_run"] = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` with the arguments `pipeline` and `loss`; `pipe` is the pipeline, None before `prepare`."""

    pipe: graphpp.Pipeline | None = None
    flag_tensor: Any
    _optimizers: list[Any]

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, loss: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        self.pipeline_options, self._loss = dict(pipeline or {}), loss
        refuse_arguments(inspect.signature(Accelerator.__init__).bind(self, *args, **kwargs).arguments)
        refuse(OWNER, faults_of_options(self.pipeline_options, {"plan": PLAN_OPTION}))
        super().__init__(*args, **kwargs)
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if self.state.num_processes != launched:
            raise GraphPPError(
                f"{OWNER}: {launched} processes were started, and accelerate takes each for the only one: give cpu=True on "
                "machines without a GPU"
            )
        self._model: PipelinedModel | None = None
        self._to_load: str | None = None

    @property
    def num_processes(self) -> int:
        """The number of processes that read data of their own."""
        return 1

    @property
    def is_last_process(self) -> bool:
        return bool(self.state.is_last_process)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        for each in args:
            if isinstance(each, torch.nn.Module) and not isinstance(each, PipelinedModel):
                refuse(OWNER, faults_of_model(each))
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> PipelinedModel:
        if isinstance(model, PipelinedModel):
            return model
        refuse(OWNER, faults_of_model(model))
        if self._model is not None:
            raise GraphPPError(
                f"prepare was given a second model, {type(model).__name__}, and a PipelineAccelerator has one pipeline: train "
                "both in one module that computes the loss, or leave a model that is not trained out of prepare"
            )
        options = {"parallel": self.device, "gradients": "rows", **self.pipeline_options}
        self._model = PipelinedModel(model, self._run)
        loss = self._loss if self.mixed_precision == "no" else _in_float32(self._loss, self.device.type)
        with self.autocast():
            self.pipe = graphpp.compile(model, loss, **options)
        if "example" in options:
            self._begin(self.pipe, self._model)
        return self._model

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        return prepared_loader(self, data_loader, self.device_placement if device_placement is None else device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self._model is not None:
            self._model.keep_own(_plain(prepared))
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True  # one step for each step of the optimizer, whatever the number of ranks
        return prepared

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pipe, model = self._required("a call of the model"), self._model
        assert model is not None
        with self.autocast():
            if not model.training:
                return self._evaluate(pipe, model, args, dict(kwargs))
            if model.pipe is None:
                pipe.prepare(*args, **{name: value for name, value in kwargs.items() if name != "loss_weight"})
                self._begin(pipe, model)
            return model.stepping(*args, **kwargs)

    def _evaluate(self, pipe: graphpp.Pipeline, model: PipelinedModel, args: Any, kwargs: dict[str, Any]) -> Any:
        """The model's output of a batch that runs whole; with a target, the `graphpp.EvalResult`."""
        target, _ = kwargs.pop("target", None), kwargs.pop("loss_weight", None)  # of microbatches
        part = graphpp.Microbatch(args, kwargs, target, kwargs.pop("loss_kwargs", None) or {})
        result = pipe.eval_microbatches([part], output="all")
        if model.pipe is None and self._begin(pipe, model):
            result = pipe.eval_microbatches([part], output="all")
        if target is not None:
            return result
        return result.output if self.mixed_precision == "no" else convert_to_fp32(result.output)

    def _begin(self, pipe: graphpp.Pipeline, model: PipelinedModel) -> bool:
        """After the capture: let the optimizers keep this rank's parameters, and do a load that waits; whether one did."""
        model.become(pipe, 1 / self.gradient_accumulation_steps)
        for optimizer in self._optimizers:
            model.keep_own(_plain(optimizer))
        if self._to_load is None:
            return False
        folder, self._to_load = self._to_load, None
        with torch.random.fork_rng():  # the generators have gone on since `load_state`
            self._training(pipe).load(folder)
        return True

    def backward(self, loss: Any, **kwargs: Any) -> None:
        if not loss.requires_grad:
            raise GraphPPError(
                "backward: the loss has no gradient, because the model was called in eval mode or without gradients: call "
                "model.train() before"
            )
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients of all ranks. Raises `GraphPPError` for a part of the model's parameters."""
        pipe, given = self._required("clip_grad_norm_"), _ids(parameters)
        with pipe.together("accelerator.clip_grad_norm_"):
            left = [fqn for fqn, each in pipe.named_parameters() if each.grad is not None and id(each) not in given]
            if left:
                raise GraphPPError(f"clip_grad_norm_: the parameters lack {left[0]}: give model.parameters(), all of them")
        self.unscale_gradients()
        return pipe.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        pipe, given = self._required("clip_grad_value_"), _ids(parameters)
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_([each for each in pipe.parameters() if id(each) in given], clip_value)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return rows_of_data(self, input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return tensor

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        yield inputs

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        yield

    def wait_for_everyone(self) -> None:
        """As accelerate's; a rank that is in another call of the pipeline raises."""
        with contextlib.nullcontext() if self.pipe is None else self.pipe.together("accelerator.wait_for_everyone"):
            pass
        super().wait_for_everyone()

    def check_trigger(self) -> bool:
        """Whether any rank has set the trigger."""
        self.wait_for_everyone()
        flag = torch.zeros((), device=self.device) if self.flag_tensor is None else self.flag_tensor.float()
        self.flag_tensor = None
        return bool(super().reduce(flag, "sum") >= 1)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model.original if isinstance(model, PipelinedModel) else super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole model's entries in the first rank's host memory, an empty dict on the others. Called by all ranks."""
        known = self._model
        if known is None or known.pipe is None or model not in (known, known.original):
            return super().get_state_dict(model, unwrap)
        return known.pipe.gather()

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        pipe = self._required("save_state", captured=True)
        with self._own_state():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        self._training(pipe).save(os.path.join(folder, _FOLDER))
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        pipe, folder = self._required("load_state"), list[str]()
        handle = super().register_load_state_pre_hook(lambda _, found: folder.append(str(found)))
        try:
            with self._own_state():
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            handle.remove()
        load_accelerator_state(folder[0], [], [], [], [], 0)  # the random states of the first rank, on every rank
        own = os.path.join(folder[0], _FOLDER)
        if not Path(own).is_dir():
            raise CheckpointError(f"{folder[0]} has no folder {_FOLDER!r}, so no PipelineAccelerator wrote it")
        if self._model is not None and self._model.pipe is not None:
            self._training(pipe).load(own)
        else:
            self._to_load = own

    @contextlib.contextmanager
    def _own_state(self) -> Iterator[None]:
        """A context in which accelerate saves or loads the state that all ranks share, without optimizers."""
        optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = optimizers

    def _training(self, pipe: graphpp.Pipeline) -> Any:
        return pipe.checkpoint(*map(_plain, self._optimizers))

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        raise GraphPPError(f"register_save_state_pre_hook does not go with {OWNER}: {_HOOK}")

    def register_load_state_pre_hook(self, hook: Any) -> NoReturn:
        raise GraphPPError(f"register_load_state_pre_hook does not go with {OWNER}: {_HOOK}")

    def free_memory(self, *objects: Any) -> Any:
        self._model = self.pipe = self._to_load = None
        return super().free_memory(*objects)

    def _required(self, call: str, captured: bool = False) -> graphpp.Pipeline:
        if self.pipe is None or (captured and (self._model is None or self._model.pipe is None)):
            before = "a batch was run" if self.pipe is not None else "prepare was given the model"
            raise GraphPPError(f"{call}: there is no pipeline before {before}")
        return self.pipe


def _in_float32(loss: Any, device: str) -> Any:
    """The loss function on float32, outside of mixed precision, as accelerate's loop calls it."""
    if loss is None:
        return None

    @functools.wraps(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    def computed(output: Any, *target: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return loss(convert_to_fp32(output), *target, **kwargs)

    return computed


def _plain(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _ids(parameters: Any) -> set[int]:
    return {id(parameters)} if isinstance(parameters, torch.Tensor) else set(map(id, parameters))
