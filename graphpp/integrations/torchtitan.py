"""torchtitan's trainer on a pipeline of graphpp: `spec.pipelining_fn = graphpp.integrations.torchtitan.pipelining_fn`.

Contract
--------
- The trainer, its configurations, models, optimizers, validator and checkpoints are torchtitan's own: 0.2.2, and 0.3.0 on torch
  2.15. `pipelining_fn` alone is exchanged, and takes the arguments of torchtitan's `pipeline_llm` of either version.
- Stages, schedule, microbatches, activation checkpointing and compilation follow the configuration. `pipeline` has further
  options of `graphpp.compile`, which replace those: `functools.partial(pipelining_fn, pipeline={"backend": "inductor"})`.
- Losses and gradients are sums over the microbatches, as in torchtitan, bit for bit in float32 on the CPU. Those of data ranks
  add up too: a pipeline averages them, so each loss has their number as its weight.
- The model is initialised with the seed of the first rank of the pipeline, so it begins with the values that torchtitan's run
  without a pipeline has for the same `debug.seed`, whatever the number of ranks.
- The one model part of a rank holds its parameters and buffers under their FQNs in the whole model, so torchtitan loads the
  checkpoints of a run with a pipeline into one without, and the other way.
- A setting that the pipeline cannot follow raises `GraphPPError` before anything is captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torchtitan.components import loss as losses

import graphpp
from graphpp.errors import GraphPPError
from graphpp.integrations.refusals import PLAN_OPTION, faults_of_options, refuse

_NAMES = ("parallel_dims", "job_config", "device", "model_args", "parallelize_fn", "loss_fn")  # of the arguments of 0.2.2
_OWN_OPTIONS = {
    "gradients": "torchtitan's losses are sums",
    "example": "training.seq_len and parallelism.pipeline_parallel_microbatch_size say it",
    "mesh": "the degrees in parallelism say it",
    "microbatches": "training.local_batch_size and parallelism.pipeline_parallel_microbatch_size say it",
    "plan": PLAN_OPTION,
}
_MASKED = {"FlexAttentionWrapper", "VarlenAttentionWrapper", "FlexAttention", "VarlenAttention"}  # classes of 0.2 and 0.3
_OTHER_DEGREES = {"tensor_parallel_degree": "tp", "context_parallel_degree": "cp", "expert_parallel_degree": "ep"}


@dataclass(frozen=True)
class _Job:
    """The arguments of `pipelining_fn` in torchtitan 0.2 or 0.3, and the parts of the configuration that a pipeline follows."""

    dims: Any  # torchtitan's `ParallelDims`
    training: Any
    parallelism: Any
    compile: Any
    checkpointing: Any  # of activations
    device: torch.device
    loss_fn: Any
    is_old: bool  # 0.2

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Job:
        config = given.get("job_config")
        if config is None:
            parts = (given["training"], given["parallelism"], given["compile_config"], given["ac_config"])
        else:
            parts = (config.training, config.parallelism, config.compile, config.activation_checkpoint)
        return cls(given["parallel_dims"], *parts, torch.device(given["device"]), given["loss_fn"], config is not None)

    @property
    def replicas(self) -> int:
        """How many ranks train a stage on other rows; torchtitan adds their gradients up, and a pipeline averages them."""
        return int(self.dims.dp_replicate * self.dims.dp_shard)

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype of the computation where it is not that of the parameters: with FSDP, which 0.3 always applies."""
        wanted, own = self.training.mixed_precision_param, self.training.dtype
        narrow = wanted != own and not (self.is_old and self.dims.dp_shard == 1)
        return getattr(torch, wanted) if narrow else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients add up, if the computation has a narrower one."""
        return None if self.param_dtype is None else getattr(torch, self.training.mixed_precision_reduce)

    def mesh(self) -> DeviceMesh:
        sizes = {"pp": self.dims.pp, "dp_replicate": self.dims.dp_replicate, "dp_shard": self.dims.dp_shard}
        kept = [name for name, size in sizes.items() if size > 1 or (name == "dp_shard" and self.param_dtype is not None)]
        if kept == ["pp"]:
            mesh: DeviceMesh = self.dims.get_mesh("pp")
            return mesh
        return init_device_mesh(self.device.type, tuple(sizes[name] for name in kept), mesh_dim_names=tuple(kept))

    def example(self, model: Any) -> graphpp.Microbatch:
        """A microbatch of tokens without data, with the arguments that the trainer of this version gives."""
        shape = self.parallelism.pipeline_parallel_microbatch_size, self.training.seq_len
        tokens = graphpp.absent(shape, torch.int64)
        if self.is_old:
            return graphpp.Microbatch((tokens,), target=tokens)
        positions = {"positions": tokens} if "positions" in inspect.signature(model.forward).parameters else {}
        return graphpp.Microbatch((tokens,), positions, tokens, {"global_valid_tokens": graphpp.absent((), torch.int64)})


def pipelining_fn(
    model: Any, *given: Any, pipeline: Mapping[str, Any] | None = None, **named: Any
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Compile `model`; returns the schedule, the part of this rank, and whether it has the first and the last stage."""
    job, more = _Job.of({**dict(zip(_NAMES, given, strict=False)), **named}), dict(pipeline or {})
    _refuse_settings(model, job, more)
    options = {**_options(model, job, more), **more, "parallel": _parallel(job, more.get("parallel"))}
    pipe = graphpp.compile(model, job.loss_fn, example=job.example(model), mesh=job.mesh(), **options)
    _initialise(pipe, model, job)
    part: Any = pipe.as_module()
    part.init_weights = lambda **_: None  # the trainer calls it, and the values are there
    schedule = pipe.as_schedule(return_outputs=False, loss_weight=job.replicas if job.replicas > 1 else None)
    return schedule, [part], pipe.is_first, pipe.is_last


def _options(model: Any, job: _Job, more: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `graphpp.compile` that the configuration says."""
    parallelism = job.parallelism
    return {
        "microbatches": job.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size,
        "schedule": parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule,
        "split": _split(model, job, "schedule" in more),
        "gradients": graphpp.Gradients("sum", dtype=job.reduce_dtype),
        "memory": _memory(model, job.checkpointing),
        "backend": "inductor" if job.compile.enable and "model" in job.compile.components else "eager",
    }


def _parallel(job: _Job, given: graphpp.Parallel | None) -> graphpp.Parallel:
    """The option `parallel` of the caller, with what the configuration says."""
    own: dict[str, Any] = {}
    if job.param_dtype is not None:
        own = {"param_dtype": job.param_dtype, "reduce_dtype": job.reduce_dtype}
    if job.parallelism.fsdp_reshard_after_forward == "always" and job.dims.dp_shard > 1:
        own["keep"] = 0
    return replace(graphpp.Parallel() if given is None else given, **own)


def _layers(model: Any) -> list[str]:
    """The FQNs of the layers of a decoder; none of another model."""
    layers: Any = getattr(model, "layers", None)
    is_decoder = isinstance(layers, nn.ModuleDict | nn.ModuleList) and hasattr(model, "norm")
    return [f"layers.{name}" for name, _ in layers.named_children()] if is_decoder else []


def _split(model: Any, job: _Job, other_schedule: bool) -> list[Any] | None:
    """Where stages start: as listed in the configuration, else as torchtitan spreads layers; None: as graphpp does.

    `other_schedule`: the schedule is not that of the configuration, which says how many stages there are.
    """
    parallelism = job.parallelism
    if parallelism.module_fqns_per_model_part is not None:
        return [list(names) for names in parallelism.module_fqns_per_model_part]
    layers = _layers(model)
    if other_schedule or not layers:
        return None
    before, after = parallelism.pipeline_parallel_first_stage_less_layers, parallelism.pipeline_parallel_last_stage_less_layers
    total, largest = len(layers) + before + after, parallelism.pipeline_parallel_layers_per_stage
    if largest is not None:
        count = -(-total // largest)
    elif parallelism.pipeline_parallel_schedule_csv:
        return None
    else:
        count = job.dims.pp * (2 if _takes_several_stages(parallelism.pipeline_parallel_schedule) else 1)
    each, longer = divmod(total, count)
    starts = accumulate(each + (stage < longer) for stage in range(count - 1))
    return [[*layers, "norm"][min(max(start - before, 0), len(layers))] for start in starts]


def _takes_several_stages(schedule: str) -> bool:
    try:
        return issubclass(get_schedule_class(schedule), PipelineScheduleMulti)
    except ValueError as error:
        raise GraphPPError(
            f"parallelism.pipeline_parallel_schedule: {error}. Give another schedule of graphpp in pipeline={{'schedule': ..}}"
        ) from error


def _memory(model: Any, checkpointing: Any) -> Any:
    """The option `memory` for the setting of activation checkpointing: a mode in 0.2, a class or None in 0.3."""
    kind = getattr(checkpointing, "mode", type(checkpointing).__qualname__)
    every = getattr(checkpointing, "selective_ac_option", "op")
    if kind == "selective" and every != "op" and _layers(model):
        return graphpp.Recompute(layers=tuple(_layers(model)[int(every) - 1 :: int(every)]))
    if kind in ("selective", "SelectiveAC.Config"):
        return "selective"
    if kind in ("memory_budget", "MemoryBudgetAC.Config"):
        return float(checkpointing.memory_budget) or "full"
    return "full" if kind in ("full", "FullAC.Config") else None


def _initialise(pipe: graphpp.Pipeline, model: Any, job: _Job) -> None:
    """Give the model memory, and the values that one process makes that is seeded as the pipeline's first rank."""
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, group=job.dims.get_mesh("pp").get_group(), group_src=0)
    with torch.random.fork_rng([job.device] if job.device.type == "cuda" else []):
        torch.manual_seed(seed[0])
        pipe.materialize(lambda module: module.init_weights(buffer_device=None) if module is model else None)


def _refuse_settings(model: Any, job: _Job, options: Mapping[str, Any]) -> None:
    """Raise `GraphPPError` for settings that the pipeline cannot follow."""
    training, size = job.training, job.parallelism.pipeline_parallel_microbatch_size
    compiles = job.compile.enable and job.compile.backend != "inductor" and "backend" not in options
    masked = any(type(module).__name__ in _MASKED for module in model.modules())
    chunked = isinstance(job.loss_fn, getattr(losses, "ChunkedLossWrapper", ()))
    faults = {
        **{f"parallelism.{name}": "take 1, and spread the model by pipeline_parallel_degree and data_parallel_shard_degree"
           for name, degree in _OTHER_DEGREES.items() if getattr(job.dims, degree) > 1},
        "training.local_batch_size": f"take a multiple of {size}, the pipeline_parallel_microbatch_size"
        * bool(training.local_batch_size % size),
        "training.enable_cpu_offload": "leave it out" * training.enable_cpu_offload,
        "compile.backend": 'take "inductor", or give pipeline={"backend": function}' * compiles,
        "ChunkedLossWrapper": "it runs backwards of its own: configure the loss inside it, such as CrossEntropyLoss" * chunked,
        "attention with masks (flex, varlen)": 'take the flavor with attn_type="sdpa" in torchtitan 0.2, and inner_attention='
        "ScaledDotProductAttention.Config() in 0.3" * masked,
        **faults_of_options(options, _OWN_OPTIONS),
    }  # fmt: skip
    refuse("graphpp's pipelining_fn", faults)
