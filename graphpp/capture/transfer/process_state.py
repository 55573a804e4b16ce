"""The state of torch in a process, outside of model and loss, on which a trace depends."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as nn_module

from graphpp._torch import aot, autograd
from graphpp.capture.transfer.libraries import is_below_libraries
from graphpp.capture.transfer.names_asked import UnreadableError

_SETTINGS = ("cudnn", "mkldnn", "cuda.matmul")  # in `torch.backends`
_QUERIES = ("is_inference_mode_enabled", "is_autocast_cache_enabled", "is_deterministic_algorithms_warn_only_enabled")
_NAMES = ("enabled", "benchmark", "deterministic", "allow_tf32", "allow_fp16_reduced_precision_reduction")


def process_state() -> tuple[Any, ...]:
    """The state of torch in this process that a trace reads: defaults, flags of kernels, hooks of all modules."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    flags = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    hooks = [list(store.values()) for key, store in sorted(vars(nn_module).items()) if key.startswith("_global_") and store]
    return torch.get_default_dtype(), torch.get_default_device(), kernels, flags, autocast, hooks


def settings_of_torch() -> list[str]:
    """Further state of torch, which a kept graph's key has: settings that a model may read, and those of the tracer.

    Raises `UnreadableError` if hooks on saved tensors are active, or if operators of torch have implementations that did not
    come with torch or an installed library.
    """
    if autograd.saves_by_hooks() or torch.is_anomaly_enabled():
        raise UnreadableError("hooks on saved tensors, or the detection of anomalies")
    for place in aot.places_of_operators():
        if not is_below_libraries(place):
            raise UnreadableError(f"an implementation of an operator of torch in {place}")
    found = [f"{name}.{key}={value}" for name in _SETTINGS for key, value in _settings_in(name)]
    found += [f"{name}={getattr(torch, name)()}" for name in _QUERIES]
    found.append(f"cuda={torch.cuda.is_available()}")
    return [*found, f"fill={vars(torch.utils.deterministic).get('fill_uninitialized_memory')}", *aot.settings()]


def _settings_in(name: str) -> list[tuple[str, Any]]:
    place: Any = torch.backends
    for part in name.split("."):
        place = getattr(place, part)
    return [(key, getattr(place, key)) for key in _NAMES if hasattr(place, key)]
