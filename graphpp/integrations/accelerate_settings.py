"""The arguments of `Accelerator`, and the variables of `accelerate launch`, that a pipeline cannot follow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]

from graphpp.integrations.refusals import refuse

OWNER = "PipelineAccelerator"
_SHARDS = "leave it out: the pipeline spreads the model, and shards it by mesh= of graphpp.compile"
_ARGUMENTS = {
    "deepspeed_plugin": _SHARDS,
    "deepspeed_plugins": _SHARDS,
    "fsdp_plugin": _SHARDS,
    "megatron_lm_plugin": _SHARDS,
    "torch_tp_plugin": _SHARDS,
    "parallelism_config": _SHARDS,
    "dynamo_backend": 'give pipeline={"backend": "inductor"} in its place',
    "dynamo_plugin": 'give pipeline={"backend": "inductor"} in its place',
}
_ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise `GraphPPError` for the first of them. `given`: the arguments of `Accelerator` by name."""
    settings, environment = given.get("dataloader_config"), os.environ
    handlers = given.get("kwargs_handlers") or ()
    precision = given.get("mixed_precision") or environment.get("ACCELERATE_MIXED_PRECISION", "no")
    compiled = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    refuse(
        OWNER,
        {
            **{name: remedy for name, remedy in _ARGUMENTS.items() if given.get(name) is not None},
            **{name: _ARGUMENTS[each] for name, each in _ENVIRONMENT.items() if environment.get(name, "").lower() == "true"},
            "ACCELERATE_DYNAMO_BACKEND": _ARGUMENTS["dynamo_backend"] if compiled not in ("", "no") else "",
            "dispatch_batches": "leave it out: each rank reads all batches" * bool(getattr(settings, "dispatch_batches", None)),
            "DistributedDataParallelKwargs": "leave it out: nothing wraps the model in DistributedDataParallel"
            * any(isinstance(each, DistributedDataParallelKwargs) for each in handlers),
            f"mixed_precision={str(precision)!r}": 'give "bf16" or "no"' if str(precision) not in ("no", "bf16") else "",
        },
    )
