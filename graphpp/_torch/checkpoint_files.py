"""The private name of torch that writes the files of a distributed checkpoint.

Checked on torch 2.13.0 and 2.15.0: `torch.distributed.checkpoint.state_dict_saver._save_state_dict`. The public `save` warns in
every single-process program, and a thread cannot suppress the warning: warning filters are process-wide.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageWriter


def write_entries(entries: dict[str, Any], writer: StorageWriter, group: dist.ProcessGroup | None) -> None:
    """Write the entries of all ranks of `group`, each rank its own shards; with None, those of this process."""
    _save_state_dict(entries, writer, process_group=group, no_dist=group is None)
