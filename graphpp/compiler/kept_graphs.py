"""Keep captured graphs in the cache folder for later runs.

Contract
--------
- A graph is found again only if everything on which the trace depended is the same: the objects that model and loss reach
  (`Reachable.digest`), the shapes and plain data of the microbatch, the mode, the kind of device, the source of graphpp, the
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

from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.cache.disk_cache import DiskCache, default_folder
from graphpp.capture.transfer.code_trail import CodeTrail, difference
from graphpp.capture.transfer.reachable_code import UnreadableError

_LOG = logging.getLogger("graphpp")
_GRAPH, _EVIDENCE = "graph.json", "evidence.json"


class KeptGraphs:
    """The graphs that are kept for one model and loss, whose objects have the digest `reached`."""

    def __init__(self, reached: bytes, device: torch.device) -> None:
        self._cache = DiskCache(default_folder())
        self._common = [reached.hex(), *_versions(), _device_name(device)]

    def find(self, example: FlatMicrobatch, training: bool) -> str | None:
        """The text of the graph for microbatches like `example`; None if there is none, or code has changed since."""
        try:
            with self._cache.existing(self._key(example, training)) as folder:
                if folder is None:
                    return None
                changed = difference(json.loads((folder / _EVIDENCE).read_text()))
                text = (folder / _GRAPH).read_text()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # also of a file that is no evidence
            _LOG.info("a kept graph cannot be read: %s", error)
            return None
        if changed is not None:
            _LOG.info("the model is captured anew, because %s is not what it was when its graph was kept", changed)
            return None
        return text

    def keep(self, example: FlatMicrobatch, training: bool, text: str, trail: CodeTrail) -> None:
        """Keep the text of a graph that was captured while `trail` noted the code."""
        try:
            evidence = json.dumps(trail.evidence())
            with self._cache.entry(self._key(example, training)) as folder:
                (folder / _GRAPH).write_text(text)
                (folder / _EVIDENCE).write_text(evidence)
        except UnreadableError as error:
            _LOG.info("the captured graph is not kept for later runs, because of %s", error)
        except OSError as error:
            _LOG.warning("the captured graph cannot be kept for later runs: %s", error)

    def _key(self, example: FlatMicrobatch, training: bool) -> str:
        words = [*self._common, *example.signature, f"training={training}"]
        return "graph-" + hashlib.sha256("\n".join(words).encode()).hexdigest()[:40]


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
