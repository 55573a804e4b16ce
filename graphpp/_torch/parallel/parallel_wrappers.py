"""The names of torch's own data parallelism around a module, without an import of it.

Checked on torch 2.13.0 and 2.15.0: the classes `DistributedDataParallel`, `FullyShardedDataParallel`, `FSDPModule` (of a module
that `fully_shard` was called with) and `ReplicateModule`; `torch.distributed._composable.contract._get_registry`, the calls
such as `replicate` that were made with a module.
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
    """The name of the call that made a module data parallel; None for a module as its author wrote it."""
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
    found = next((_CALLS[kind] for kind in kinds if kind in _CALLS), None)
    contract = sys.modules.get("torch.distributed._composable.contract")
    if found is None and contract is not None:
        found = next((call for call in contract._get_registry(module) or () if call in _CALLS.values()), None)
    return found
