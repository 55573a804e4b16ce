"""transformers' Trainer on a pipeline: `Trainer(model, args, ..)` becomes `PipelineTrainer(model, args, .., pipeline={..})`.

Contract
--------
- `pipeline`: options of `graphpp.compile`. All ranks are one pipeline and read the same batches, in the order of one process.
- The batches of one optimizer step (`gradient_accumulation_steps`) are the microbatches of one pipeline step, so losses,
  gradient norms and learning rates are those of Trainer in one process, bit for bit in float32 without dropout. With
  `pipeline={"microbatches": n}` each batch is cut into n microbatches, and the losses differ by rounding.
- `compute_loss` is Trainer's or a subclass's own. It is called in each step, for the arguments that it gives to the model, and
  in the capture, with the model's output. So it calls the model once. If it reads values of tensors for metrics, the class
  says so (`reads_values`), and it is called once more after each step (`value_reads.py`).
- An evaluation runs each batch whole; every rank gets the logits.
- A checkpoint holds the model as `save_pretrained` writes it, and the training in the folder `graphpp`, which any number of
  ranks and any split resumes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]

import graphpp
from graphpp.errors import GraphPPError
from graphpp.integrations.loaders import prepared_loader, rows_of_data
from graphpp.integrations.random_state import RandomState, generators_kept
from graphpp.integrations.refusals import PLAN_OPTION, faults_of_model, faults_of_options, refuse, refuse_one_shot
from graphpp.integrations.stand_in import StandIn, answering, call_of, rows_of, tensors_with_rows
from graphpp.integrations.value_reads import read_values, reads_postponed, with_outputs

_FOLDER = "graphpp"
_OWN_OPTIONS = {
    "gradients": "Trainer's arguments say how losses are reduced",
    "example": "the first batch is the example",
    "plan": PLAN_OPTION,
}


_Trainer: Any = object  # of the subclass that this mixin is part of


class PipelineMixin(_Trainer):  # type: ignore[misc]
    """Puts a subclass of `transformers.Trainer` on a pipeline: `class PipelineSFT(PipelineMixin, SFTTrainer)`.

    `reads_values`: whether `compute_loss` reads values of tensors, such as `.item()`, for its metrics.
    """

    reads_values = False
    pipe: graphpp.Pipeline | None = None
    current_flos: Any
    _counting = False  # the items of a batch

    def __init__(
        self, model: Any = None, args: Any = None, *rest: Any, pipeline: Mapping[str, Any] | None = None, **named: Any
    ) -> None:
        self.pipeline_options = dict(pipeline or {})
        super().__init__(model, args, *rest, **named)
        _refuse_settings(self, self.pipeline_options)
        graphpp.unwatched(self)  # the loss is a method, and the trainer's state changes in each step
        self._waiting: list[dict[str, Any]] = []  # batches of the optimizer step
        self._random, self._piped = RandomState(), None
        self._made: torch.optim.Optimizer | None = None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, **_: model
        accelerator.prepare_data_loader = lambda loader, **_: prepared_loader(accelerator, loader, False)
        accelerator.gather = lambda values: values
        # Trainer sets gather_function to this method of the accelerator again after each evaluation
        self.gather_function = accelerator.gather_for_metrics = partial(rows_of_data, accelerator)

    def get_tp_size(self) -> int:
        """Trainer's word for the number of ranks that read the same batch."""
        return 1 if self._counting else int(self.args.world_size)

    def _get_num_items_in_batch(self, *args: Any, **named: Any) -> Any:
        """The number in one process: `gather` adds nothing, so there is nothing to divide."""
        self._counting = True
        try:
            return super()._get_num_items_in_batch(*args, **named)
        finally:
            self._counting = False

    def store_flos(self) -> None:
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        """As Trainer's, which has collectives of its own: a rank that is in another call of the pipeline raises before."""
        with self._required().together("the logging of Trainer"):
            pass
        super()._maybe_log_save_evaluate(*args, **named)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is not None:
            known: Any = self._made
            if known is not None and known is getattr(self.optimizer, "optimizer", self.optimizer):
                self._waiting.clear()  # of an earlier train() that was interrupted
                return known
            raise GraphPPError(
                "optimizers=: an optimizer of model.parameters() has parameters of other ranks: give "
                "optimizer_cls_and_kwargs=(class, arguments), or override create_optimizer and use self.pipe.parameters()"
            )
        pipe = self._pipe_for({})
        self.model.named_parameters = lambda *_, **__: pipe.named_parameters()
        try:
            made: torch.optim.Optimizer = super().create_optimizer(model)
        finally:
            del self.model.named_parameters
        self._made = made
        return made

    def _first_batch(self) -> dict[str, Any]:
        """The first batch of the training; the generators that made it are as before."""
        refuse_one_shot(self.train_dataset)
        with generators_kept():
            return dict(next(iter(self.get_train_dataloader())))

    def _pipe_for(self, batch: dict[str, Any]) -> graphpp.Pipeline:
        """The pipeline of the current model; `batch`: an example for a trainer without training data."""
        if self.pipe is None or self._piped is not self.model:
            options = {"parallel": self.args.device, **self.pipeline_options}
            options["microbatches"] = self._pieces * self.args.gradient_accumulation_steps
            if self.reads_values:
                options["memory"] = with_outputs(options.get("memory"))
            inputs = self._prepare_inputs(batch if self.train_dataset is None else self._first_batch())
            example = self._microbatch(self._example(inputs), self._get_num_items_in_batch([inputs], self.args.device))
            self._piped = self.model
            with self.accelerator.autocast():
                self.pipe = graphpp.compile(self.model, self._loss, example=example, gradients="sum", **options)
        return self.pipe

    def _example(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The microbatch that is captured: of the first batch."""
        return self._cut(inputs)[0]

    def _completed(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Microbatches with further inputs that `compute_loss` needs, for a subclass to add."""
        return parts

    @property
    def _pieces(self) -> int:
        return int(self.pipeline_options.get("microbatches", 1))

    def _cut(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """The microbatches of a batch: tensors with its rows are cut, all else goes whole."""
        pieces, rows = self._pieces, rows_of(inputs)
        if pieces == 1:
            return [inputs]
        cut = {key: value.tensor_split(pieces) for key, value in tensors_with_rows(inputs).items() if len(value) == rows}
        parts = [{key: cut[key][at] if key in cut else value for key, value in inputs.items()} for at in range(pieces)]
        return [part for part in parts if all(len(part[key]) for key in cut)]

    def _microbatch(self, inputs: dict[str, Any], items: Any) -> graphpp.Microbatch:
        loss = lambda model: self.compute_loss(model, dict(inputs), num_items_in_batch=items)  # noqa: E731
        args, kwargs = call_of(self.model, "compute_loss", loss)
        return graphpp.Microbatch(args, kwargs, dict(inputs), {} if items is None else {"num_items_in_batch": items})

    def _loss(self, output: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """The loss of one microbatch, captured with the model: `compute_loss` on the model's output."""
        model = answering(self.model, output, "compute_loss")
        with reads_postponed(self, self.reads_values):
            return self.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep the batch; with the last one of an optimizer step, run them all. Returns the loss of the last batch."""
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = [self._prepare_inputs(each) for each in self._waiting], []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        pipe, parts = self._pipe_for(batches[0]), [self._cut(batch) for batch in batches]
        inputs_of_all = self._completed([part for batch in parts for part in batch])
        microbatches = [self._microbatch(part, num_items_in_batch) for part in inputs_of_all]
        weights = [weight for batch in parts for weight in self._weights(batch, len(batches), num_items_in_batch)]
        with self.accelerator.autocast(), self.compute_loss_context_manager():
            ranks: Any = "each" if self.reads_values else "last"
            result = pipe.step_microbatches(microbatches, loss_weight=weights, scaler=self.accelerator.scaler, output=ranks)
            if self.reads_values:
                read_values(self, inputs_of_all, result, num_items_in_batch)
        weighted = iter([loss / (1 / weight) for loss, weight in zip(result.losses, weights, strict=True)])
        losses: list[Any] = [sum(next(weighted) for _ in batch) for batch in parts]
        last: torch.Tensor = losses.pop()
        for loss in losses:
            if not self.args.logging_nan_inf_filter or loss.isfinite():
                self._tr_loss += loss
        return last

    def _weights(self, parts: list[dict[str, Any]], steps: int, items: Any) -> list[float]:
        """The factor of each part's loss, as Trainer divides a loss that is a mean of its batch."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        if scaled:
            return [1.0] * len(parts)
        rows = [max(rows_of(part), 1) for part in parts]
        return [each / sum(rows) / steps for each in rows]

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._norm(math.inf) if grad_norm is None else grad_norm

    def _norm(self, largest: float) -> torch.Tensor:
        self.accelerator.unscale_gradients()
        return self._required().clip_grad_norm_(largest)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        pipe = self._pipe_for(inputs)

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with self.accelerator.autocast():
                output = pipe.eval_microbatches([graphpp.Microbatch(args, kwargs)], output="all").output
            return convert_to_fp32(output) if self.accelerator.native_amp else output

        return super().prediction_step(StandIn(self.model, evaluate), inputs, *rest, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `save_pretrained` does. Called by all ranks."""
        if self.pipe is None:
            super().save_model(output_dir, _internal_call)
            return
        whole = self.pipe.gather()  # on the first rank
        if self.args.should_save:
            noted: dict[str, Any] = getattr(getattr(self.model, "config", None), "__dict__", {})
            before = dict(noted)
            self._save(output_dir or self.args.output_dir, state_dict=whole)
            noted.update(before)  # save_pretrained changes the configuration, which other ranks do not
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _training(self) -> Any:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        return self._required().checkpoint(optimizer, self.lr_scheduler, extra={"random": self._random})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._training().save(os.path.join(output_dir, _FOLDER))

    def _save_rng_state(self, output_dir: str) -> None:
        """It is in the checkpoint of the training."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The parameters come with the optimizer, once the pipeline is there."""
        if not os.path.isdir(os.path.join(resume_from_checkpoint, _FOLDER)):
            raise GraphPPError(
                f"{resume_from_checkpoint} has no folder {_FOLDER!r}, so no PipelineTrainer wrote it: start from its weights, "
                "by from_pretrained, without resume_from_checkpoint="
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._training().load(os.path.join(checkpoint, _FOLDER))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._random.restore()

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self._load_from_checkpoint(best)
        self._load_optimizer_and_scheduler(best)

    def _required(self) -> graphpp.Pipeline:
        if self.pipe is None:
            raise GraphPPError("the trainer has no pipeline yet: call train() or evaluate() first")
        return self.pipe


class PipelineTrainer(PipelineMixin, transformers.Trainer):
    """`transformers.Trainer` with the argument `pipeline`: options of `graphpp.compile`, such as `{"schedule": "1F1B"}`."""


def _refuse_settings(trainer: Any, options: Mapping[str, Any]) -> None:
    """Raise `GraphPPError` for settings of Trainer that a pipeline cannot follow."""
    args, count = trainer.args, options.get("microbatches", 1)
    counts = isinstance(count, int) and count > 0
    faults = {
        "DeepSpeed": "leave deepspeed= out: the pipeline shards by mesh=" if trainer.is_deepspeed_enabled else "",
        "FSDP": "leave fsdp= out: the pipeline shards by mesh=" if args.fsdp or trainer.is_fsdp_enabled else "",
        **faults_of_model(trainer.model),
        "torch_compile": 'give pipeline={"backend": "inductor"} in its place' if args.torch_compile else "",
        "save_only_model": "load_best_model_at_end needs whole ones" * (args.save_only_model and args.load_best_model_at_end),
        "predict_with_generate=True": "leave it out, and generate after the training with the saved model, by from_pretrained"
        * bool(getattr(args, "predict_with_generate", False)),
        "nn.DataParallel": "start one process per GPU, by torchrun" if args.n_gpu > 1 else "",
        "pipeline['microbatches']": "give the number of parts of each batch, 1 or more" * (not counts),
        **faults_of_options(options, _OWN_OPTIONS),
    }
    refuse("PipelineTrainer", faults)
