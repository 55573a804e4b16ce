"""The private name of torch that writes the files of a distributed checkpoint, and a writer that names the save in each file.

Checked on torch 2.13.0 and 2.15.0: `torch.distributed.checkpoint.state_dict_saver._save_state_dict`. The public `save` warns in
every single-process program, and a thread cannot suppress the warning: warning filters are process-wide.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future


class NamedWriter(FileSystemWriter):
    """Writes data files that have the name of their save in their own names and as their last bytes.

    The metadata has the name as `storage_meta.save_id`. Readers of torch look for neither.
    """

    def __init__(self, folder: Path, save: str) -> None:
        super().__init__(folder)
        self._folder, self.save_id = folder, save

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = plan.storage_data
        named = replace(prefix, prefix=f"{prefix.prefix}{self.save_id}_")
        written = super().write_data(replace(plan, storage_data=named), planner)
        for name in {each.storage_data.relative_path for each in written.value()}:
            with (self._folder / name).open("ab", buffering=0) as file:
                file.write(self.save_id.encode())
                os.fsync(file.fileno())
        return written


def write_entries(entries: dict[str, Any], writer: StorageWriter, group: dist.ProcessGroup | None) -> None:
    """Write the entries of all ranks of `group`, each rank its own shards; with None, those of this process."""
    _save_state_dict(entries, writer, process_group=group, no_dist=group is None)
