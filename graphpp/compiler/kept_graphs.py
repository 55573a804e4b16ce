"""Keep captured graphs in the cache folder for later runs.

Contract
--------
- A graph is found again only if everything on which the trace depended is the same: the objects that model and loss reach
  (`Reachable.exact`), the shapes and plain data of the microbatch, the mode, the kind of device, the source of graphpp, the
  versions of Python and torch, and the code that ran (`capture/transfer/code_trail.py`).
- An entry that is torn, or was written by another version, means a new capture. A folder that cannot be written is logged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
from pathlib import Path

import torch

from graphpp._torch import aot, pytree
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.cache.disk_cache import DiskCache, default_folder
from graphpp.capture.trace import CapturedGraph
from graphpp.capture.transfer.code_trail import OPERATORS_OF_TORCH, CodeTrail, first_difference
from graphpp.capture.transfer.names_asked import UnreadableError
from graphpp.capture.transfer.process_state import settings_of_torch
from graphpp.capture.transfer.reachable import Reachable

_LOG = logging.getLogger("graphpp")
_GRAPH, _EVIDENCE = "graph.json", "evidence.json"
_PLAIN_STRUCTURES = (dict, list, tuple)


class KeptGraphs:
    """The graphs that are kept for one model and loss, whose objects are `held`."""

    def __init__(self, held: Reachable, device: torch.device) -> None:
        self._held = held
        self._cache = DiskCache(default_folder())
        self._common = [held.exact.hex(), *_versions(), _device_name(device)]
        self._sought: str | None = None  # the key of the last look-up, before the capture

    def find(self, example: FlatMicrobatch, training: bool) -> str | None:
        """The text of the graph for microbatches like `example`; None if there is none, or code has changed since."""
        self._sought = None
        try:
            _check_comparable(example)
            self._sought = self._key(example, training)
            with self._cache.existing(self._sought) as folder:
                if folder is None:
                    return None
                changed = first_difference(json.loads((folder / _EVIDENCE).read_text()))
                text = (folder / _GRAPH).read_text()
        except UnreadableError as error:
            _LOG.info("no captured graph is kept or looked for, because of %s", error)
            return None
        except Exception as error:  # of the disk, of a file that is no evidence, or of an object of a library
            _LOG.info("a kept graph cannot be read: %s", error)
            return None
        if changed is not None:
            _LOG.info("the model is captured anew, because %s is not what it was when its graph was kept", changed)
            return None
        return text

    @property
    def has_key(self) -> bool:
        """Whether a graph can be kept under the key of the last look-up; some state of torch has no key."""
        return self._sought is not None

    def keep(self, graph: CapturedGraph, text: str, trail: CodeTrail, *, changed: bool) -> None:
        """Keep the text of a graph that was captured after `find` while `trail` noted the code.

        `changed`: the capture has changed an object of model or loss. It may be a cache of the program: the code that filled
        it is not in the trail, which notes the code of another run.
        """
        if self._sought is None:
            return
        try:
            if changed:
                raise UnreadableError("an object of the model or the loss that the capture changes")
            _check_operators(graph)
            evidence = json.dumps(trail.evidence(self._held))
            with self._cache.entry(self._sought) as folder:
                (folder / _GRAPH).write_text(text)
                (folder / _EVIDENCE).write_text(evidence)
        except UnreadableError as error:
            _LOG.info("the captured graph is not kept for later runs, because of %s", error)
        except Exception as error:  # of the disk, or of an object of a library
            _LOG.warning("the captured graph cannot be kept for later runs: %s: %s", type(error).__name__, error)

    def _key(self, example: FlatMicrobatch, training: bool) -> str:
        words = [*self._common, *settings_of_torch(), *example.signature, f"training={training}"]
        return "graph-" + hashlib.sha256("\n".join(words).encode()).hexdigest()[:40]


def _check_comparable(example: FlatMicrobatch) -> None:
    """Raise `UnreadableError` under a mode that changes operators, and for classes that the user registered with pytree."""
    if aot.modes_active():
        raise UnreadableError("a TorchFunctionMode or TorchDispatchMode")
    pending = [example.spec]
    while pending:
        spec = pending.pop()
        if spec.type is not None and spec.type not in _PLAIN_STRUCTURES:
            raise UnreadableError(f"an argument of the type {spec.type.__qualname__}")
        pending += pytree.children(spec)


def _check_operators(graph: CapturedGraph) -> None:
    """Raise `UnreadableError` for an operator that is not torch's own: its code runs below the code that is noted."""
    for node in graph.joint.graph.nodes:
        name = str(node.target)
        if isinstance(node.target, aot.Operator) and not name.startswith(OPERATORS_OF_TORCH):
            raise UnreadableError(f"the operator {name}")


@functools.cache
def _versions() -> tuple[str, ...]:
    """Python, torch, and the source text of graphpp, which may change without its version."""
    root = Path(__file__).parents[1]
    source = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        source.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return sys.version, torch.__version__, source.hexdigest()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
