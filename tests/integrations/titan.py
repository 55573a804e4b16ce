"""torchtitan's trainer (0.2) on the CPU, with its llama3 debug model and the example's data.

torchtitan trains on GPUs: it asks torch for the module of the device when it is imported, and that of the CPU lacks functions.
`on_cpu` imports torchtitan with a module that has them, and without its kernels in Triton. Nothing of it is needed on a GPU.
"""

from __future__ import annotations

import gc
import itertools
import os
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[2]
ARGUMENTS = (
    "--model.name=bytes", "--training.local_batch_size=4", "--training.seq_len=32", "--training.steps=3", "--debug.seed=7",
    "--training.mixed_precision_param=float32", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=2", "--optimizer.lr=1e-3",
    "--parallelism.pipeline_parallel_degree={ranks}",
)  # fmt: skip


def _device_module() -> Any:
    known = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")}
    nothing = dict.fromkeys(("set_device", "empty_cache", "reset_peak_memory_stats"), lambda *_: None)
    properties = types.SimpleNamespace(total_memory=2**34)
    told = {"current_device": lambda: 0, "get_device_name": lambda *_: "cpu", "memory_stats": lambda *_: {}}
    return types.SimpleNamespace(**{**known, **nothing, **told, "get_device_properties": lambda *_: properties})


@contextmanager
def on_cpu() -> Iterator[Any]:
    """The module `torchtitan.train`, and the example's spec registered as `bytes`, with the flavors debugmodel and small."""
    module = _device_module()
    sys.modules.setdefault("torchtitan.models.moe.kernels", types.SimpleNamespace(generate_permute_indices=None))  # type: ignore
    sources = patch.object(sys, "path", [str(ROOT / "examples"), *sys.path])
    type_of, module_of = "torch._utils._get_available_device_type", "torch._utils._get_device_module"
    with patch(type_of, lambda: "cpu"), patch(module_of, lambda _: module), sources:
        import torchtitan.train as train
        from torchtitan.protocols import train_spec

        train_spec._extra_train_specs.clear()
        spec = runpy.run_path(str(ROOT / "examples" / "torchtitan_train.py"))["spec"]
    small = replace(spec.model_args["debugmodel"], dim=32, n_heads=4, n_layers=2, vocab_size=256)
    spec.model_args = {**spec.model_args, "small": small}
    quick = types.SimpleNamespace(**{**vars(train.time), "sleep": lambda _: None})
    with patch("torchtitan.train.time", quick), patch("torchtitan.tools.utils.get_peak_flops", lambda _: 1e12):
        try:
            yield train
        finally:
            gc.enable()  # torchtitan's trainer disables it


def trainer(train: Any, ranks: int, folder: Path, *arguments: str, own: bool = False) -> Any:
    """A trainer on all ranks; `own`: with torchtitan's pipeline, and the values that one process makes with the same seed."""
    from torchtitan.components.validate import Validator
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.protocols.train_spec import get_train_spec

    from graphpp.integrations.torchtitan import pipelining_fn

    spec = get_train_spec("bytes")
    spec.pipelining_fn = pipeline_llm if own else pipelining_fn
    given = [each.format(ranks=ranks) for each in (*ARGUMENTS, f"--job.dump_folder={folder}", *arguments)]
    rank = torch.distributed.get_rank()
    data = patch("torchtitan.components.validate.build_text_validation_dataloader", _validation(spec.build_dataloader_fn))
    with patch.dict(os.environ, LOCAL_RANK=str(rank)), data:
        made = train.Trainer(ConfigManager().parse_args(given))
    assert not hasattr(made, "validator") or isinstance(made.validator, Validator)
    if own and ranks > 1:
        _set_values(made)
    return made


class InTurns:
    """The batches of all data ranks, one rank after the other; takes the place of a loader that saves no state."""

    def __init__(self, loaders: list[Any]) -> None:
        self._loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(zip(*self._loaders, strict=True))


def _validation(loader: Any) -> Any:
    def build(**named: Any) -> Any:
        made = loader(**named)
        made.at = 500
        return made

    return build


def _set_values(made: Any) -> None:
    """The values that torchtitan's whole model has in one process with the seed of the run."""
    values = initial_values(made)
    with torch.no_grad():
        for name, parameter in parameters(made).items():
            parameter.copy_(values[name])


def initial_values(made: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = made.train_spec.model_cls(made.model_args)
    model.to_empty(device="cpu")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(made.job_config.debug.seed)
        model.init_weights()
    return dict(model.named_parameters())


def parameters(made: Any) -> dict[str, torch.Tensor]:
    """The parameters of this rank; torchtitan wraps the layers that it recomputes."""
    named = (each for part in made.model_parts for each in part.named_parameters())
    return {name.replace("_checkpoint_wrapped_module.", ""): parameter for name, parameter in named}


def trained(made: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train; what the trainer logs on this rank (-1 for the loss where there is none), and the parameters of this rank."""
    logged: list[Any] = []
    metrics = made.metrics_processor
    metrics.log = lambda step, loss, largest, norm, **more: logged.append((step, loss, largest, norm, more["extra_metrics"]))
    metrics.log_validation = lambda loss, step: logged.append((step, "validation", loss))
    made.train()
    made.close()
    return logged, {name: value.detach().clone() for name, value in parameters(made).items()}
