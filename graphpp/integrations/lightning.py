"""Lightning on a pipeline: `Trainer(strategy=PipelineStrategy(schedule="1F1B", microbatches=4), devices=2)`.

Contract
--------
- The keyword arguments of `PipelineStrategy` are options of `graphpp.compile`. All ranks are one pipeline and read the same
  batches, in the order of one process: the strategy gives every rank the random generators of the first one.
- `training_step` is captured whole, model and loss. A batch is cut into microbatches, which are one pipeline step. So
  `training_step` reads no values of tensors. `validation_step`, `test_step` and `predict_step` are captured too; each runs its
  batch whole, and every rank gets the result.
- `self.log` in `training_step` logs the mean of the value over the microbatches. `training_step` returns the loss, or a dict
  with the loss and further numbers. The loss of a batch is the mean over its rows, unless `gradients=` says otherwise.
- A checkpoint file has the whole model and what Lightning keeps. The folder beside the file (`<file>.graphpp`) has the training
  state with the optimizers, which any number of ranks and any split resumes.
- After `fit` the module has the trained values of its rank; with `memory=graphpp.Memory(release=False)` those of all ranks.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import graphpp
from graphpp.errors import GraphPPError
from graphpp.integrations.lightning_steps import Steps, loss_of_step
from graphpp.integrations.random_state import RandomState, generators_kept
from graphpp.integrations.refusals import (
    PLAN_OPTION,
    faults_of_model,
    refuse,
    refuse_one_shot,
    refuse_shares,
    unknown_options,
)

_SUFFIX = ".graphpp"
_OWNER = "PipelineStrategy"
_OWN_OPTIONS = {
    "example": "the first batch is the example",
    "mesh": "all processes of the trainer are one pipeline, and replicas have no loaders of their own yet",
    "plan": PLAN_OPTION,
}


class PipelineStrategy(ParallelStrategy):  # type: ignore[misc]
    """A Lightning strategy: one pipeline over all processes. `options`: those of `graphpp.compile`."""

    def __init__(self, *, process_group_backend: str | None = None, **options: Any) -> None:
        super().__init__()
        own = {name: reason for name, reason in _OWN_OPTIONS.items() if name in options}
        refuse(_OWNER, {f"{name}=": reason for name, reason in {**own, **unknown_options(options)}.items()})
        self._options, self._backend, self.num_nodes = options, process_group_backend, 1
        self.pipe: graphpp.Pipeline | None = None
        self._steps: Steps | None = None
        self._piped: Any = None
        self._loaded = ""

    # ------------------------------------------------------------------ processes

    @property
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices
        return devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank
        _init_dist_connection(environment, self._backend or dist.get_default_backend_for_device(self.root_device))
        random = RandomState()
        random.load_state_dict(self.broadcast(random.state_dict()))
        random.restore()

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        held = [obj]
        dist.broadcast_object_list(held, src, device=self.root_device)
        return held[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor  # every rank has the same value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, decision)
        return False not in every if all else True in every

    # ------------------------------------------------------------------ the pipeline

    def model_to_device(self) -> None:
        self.lightning_module._device = self.root_device  # the pipeline moves this rank's part

    def setup(self, trainer: Any) -> None:
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if not module.automatic_optimization:
            raise GraphPPError("automatic_optimization=False calls backward inside training_step, which a pipeline runs whole")
        refuse(_OWNER, faults_of_model(module))
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.precision_plugin.clip_grad_by_norm = self._clip
        self._steps = Steps(module, self.root_device)
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # every rank logs the value of the whole batch
        if self.pipe is None or self._piped is not module:
            self._piped = module
            graphpp.unwatched(trainer)
            defaults = {"parallel": self.root_device, "gradients": "rows"}
            self.pipe = graphpp.compile(module, loss_of_step, **{**defaults, **self._options})
        if fitting:
            whole = list(module.parameters())  # other ranks' have memory until the capture, as some optimizers require
            self.setup_optimizers(trainer)
            with self.precision_plugin.train_step_context():
                self.pipe.prepare(*self._first_batch(trainer), target=True)
            self.pipe.let_optimizers_drop(whole, self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            scaler = getattr(self.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            self._module = self.pipe.as_module(loss_scale=scale / trainer.accumulate_grad_batches)

    def _first_batch(self, trainer: Any) -> tuple[Any, ...]:
        """The arguments of the first training step; the generators that made its batch are as before."""
        trainer.fit_loop.setup_data()
        loaders = CombinedLoader(trainer.train_dataloader, "max_size_cycle")
        for each in loaders.flattened:
            refuse_shares(each)
            refuse_one_shot(getattr(each, "dataset", each))
        with generators_kept():
            batch = next(iter(loaders))[0]
        batch = self.batch_to_device(self.precision_plugin.convert_input(batch))
        _, *indices = trainer.fit_loop.epoch_loop._build_kwargs({}, batch, 0).values()
        return self._arguments("training_step", batch, *indices)

    def _arguments(self, name: str, batch: Any, *indices: int) -> tuple[Any, ...]:
        return self._required.arguments(name, batch, indices)

    @property
    def _required(self) -> Steps:
        assert self._steps is not None, "setup makes the steps"
        return self._steps

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise GraphPPError(f"configure_optimizers returned {len(self.optimizers)} optimizers: return one, with groups")

    @property
    def _pipeline(self) -> graphpp.Pipeline:
        if self.pipe is None:
            raise GraphPPError("the strategy has no pipeline before trainer.fit, validate, test or predict")
        return self.pipe

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        self._pipeline.clip_grad_norm_(clip_val)

    def training_step(self, *args: Any) -> Any:
        """Run a batch as one step of the pipeline; the loss that is returned has a backward."""
        self._module.training = self.lightning_module.training
        with self.precision_plugin.train_step_context():
            output = self._module(*self._arguments("training_step", *args), target=True)
        returned = self._required.report(output.metrics, len(output.losses))
        return {"loss": output.loss, **returned} if returned else output.loss

    def _evaluate(self, name: str, context: Any, args: tuple[Any, ...]) -> Any:
        with context:
            result = self._pipeline.eval_microbatches([graphpp.Microbatch(self._arguments(name, *args))], output="all")
        returned, noted = result.output
        self._required.report(noted)
        return returned

    def validation_step(self, *args: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context(), args)

    def test_step(self, *args: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context(), args)

    def predict_step(self, *args: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context(), args)

    # ------------------------------------------------------------------ values and checkpoints

    def on_train_end(self) -> None:
        module = self.lightning_module
        if not any(each.is_meta for each in module.parameters()):
            module.load_state_dict(self._pipeline.gather(rank=None), strict=False)

    def teardown(self) -> None:
        if self._steps is not None:
            self._steps.remove()
        super().teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._pipeline.gather()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # in the folder beside the file

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:
            self._pipeline.checkpoint(*self.optimizers).save(f"{filepath}{_SUFFIX}")

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}{_SUFFIX}", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded = str(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._pipeline.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        folder = f"{self._loaded}{_SUFFIX}"
        if not os.path.isdir(folder):
            raise GraphPPError(
                f"{self._loaded} has no folder {folder} with the optimizer's state beside it: keep both together, or start "
                "from the weights by load_from_checkpoint, without ckpt_path="
            )
        self._pipeline.checkpoint(*self.optimizers).load(folder)
