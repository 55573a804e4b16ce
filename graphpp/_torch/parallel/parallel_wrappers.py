"""Detects modules wrapped by torch's own data parallelism, without importing it.

Checked on torch 2.13.0 and 2.15.0: the class names in `_CALLS`; `torch.distributed._composable.contract._get_registry`, the
calls such as `replicate` made on a module.
"""

from __future__ import annotations

import sys

from torch import nn

_CALLS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "ReplicateModule": "replicate",
}


def wrapper_of(module: nn.Module) -> str | None:
    """The name of the call that made a module data parallel; None for an unwrapped module."""
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
    found = next((_CALLS[kind] for kind in kinds if kind in _CALLS), None)
    contract = sys.modules.get("torch.distributed._composable.contract")
    if found is None and contract is not None:
        found = next((call for call in contract._get_registry(module) or () if call in _CALLS.values()), None)
    return found
