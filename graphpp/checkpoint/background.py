"""Write a checkpoint in the background while the training continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from graphpp._torch.parallel.sharded_tensor import local_of, with_local
from graphpp._torch.pytree import tree_flatten, tree_unflatten
from graphpp.streams import to_host, wait_for_stream


def host_copies(entries: dict[str, Any]) -> dict[str, Any]:
    """`entries` with every tensor copied to host memory once, all at the same time; complete on return."""
    leaves, structure = tree_flatten(entries)
    tensors = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    copies = {
        key: with_local(tensor, to_host(_own(tensor), tensor.device)) for key, tensor in tensors.items()
    }
    for device in {tensor.device for tensor in tensors.values()}:
        wait_for_stream(device)
    staged: dict[str, Any] = tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], structure)
    return staged


def _own(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    return tensor if local is None else local


def in_background(work: Callable[[], object]) -> Future[Any]:
    thread = ThreadPoolExecutor(1, "graphpp-checkpoint")
    written = thread.submit(work)
    thread.shutdown(wait=False)
    return written


class PendingSave:
    """A save that continues in the background; the training may continue meanwhile."""

    def __init__(self, written: Future[Any] | None, publish: Callable[[], None]) -> None:
        """`written`: None on a rank whose replica does not write; `publish` raises the error of the writing."""
        self._written, self._publish = written, publish
        self._waited = False

    def done(self) -> bool:
        """Whether everything is written, so that `wait` would not wait for the disk."""
        return self._written is None or self._written.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete, and publish it. Called by all ranks; raises the error of the writing."""
        if not self._waited:
            self._waited = True
            self._publish()
