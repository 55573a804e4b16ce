"""The state of torch in a process, outside of model and loss, on which a trace depends."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as nn_module


def process_state() -> tuple[Any, ...]:
    """The state of torch in this process that a trace reads: defaults, flags of kernels, hooks of all modules."""
    cuda = torch.backends.cuda
    kernels = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    flags = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    hooks = [list(store.values()) for key, store in sorted(vars(nn_module).items()) if key.startswith("_global_") and store]
    return torch.get_default_dtype(), torch.get_default_device(), kernels, flags, autocast, hooks
