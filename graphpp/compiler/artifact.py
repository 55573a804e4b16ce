"""Save captured graphs in the folder of `artifact=`, and load them at a later start.

- A file has two lines: a JSON header with the facts and the SHA-256 of the second line, then the graph (`capture/transfer/`).
  The file's name is a digest of the facts. Nothing is pickled.
- A graph is loaded only if all facts are equal: microbatch signature, training or evaluation, options that capture reads, FQNs
  with shapes and dtypes, the digest of model and loss (`capture/transfer/digest.py`), the source files of classes and functions
  in both, and the versions of torch and graphpp.
- The user answers for anything else that model and loss read; `graphpp.verify(artifact=)` compares a loaded graph with eager.
- A damaged file, and one that another user may have written, is replaced by the new graph. An unwritable folder is logged.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.cache.disk_cache import keep_ours, not_ours
from graphpp.capture.objects.names import comes_with_torch, unwrapped
from graphpp.capture.objects.walk import HOOKS
from graphpp.capture.sizes.open_sizes import Open
from graphpp.compiler.request import CompileRequest
from graphpp.log import logger
from graphpp.parallel.rank_place import RankPlace
from graphpp.passes.forward.cut_words import WordParts
from graphpp.runtime.model_state import tensor_lines

_LOG = logger(__name__)
Facts = Mapping[str, str]


class Artifact:
    """The graphs of one model and loss in a folder; `digest`: the digest of their objects."""

    def __init__(self, folder: Path, request: CompileRequest, digest: bytes, words: WordParts | None = None) -> None:
        self._folder, self._request, self._digest, self._words = folder, request, digest, words

    def load(self, example: FlatMicrobatch, training: bool, open_sizes: Open) -> str | None:
        """The text of the graph for microbatches like `example`; None if it is missing or damaged."""
        facts = self._facts(example, training, open_sizes)
        path = self._path(facts)
        try:
            header, text = path.read_text().split("\n", 1)
        except FileNotFoundError:
            changed = _difference(self._folder, facts)
            _LOG.info("the model is captured: %s has no graph for this call%s", self._folder, changed)
            return None
        except (OSError, ValueError) as error:
            _LOG.warning("the model is captured, because %s cannot be read: %s", path, error)
            return None
        if why := not_ours(path):
            _LOG.warning("the model is captured, because %s; the file is replaced", why)
            return None
        if _header(facts, text) != header:
            _LOG.warning("the model is captured, because %s is damaged; the file is replaced", path)
            return None
        _LOG.info("the captured graph in %s is used", path)
        return text

    def save(self, text: str, example: FlatMicrobatch, training: bool, open_sizes: Open) -> None:
        """Save the text of a graph. A failure to write is logged."""
        facts = self._facts(example, training, open_sizes)
        path = self._path(facts)
        partial = path.with_suffix(f".{uuid4().hex}.partial")  # hosts that share the folder have equal process ids
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(f"{_header(facts, text)}\n{text}")
            keep_ours(partial)
            partial.replace(path)
        except OSError as error:
            _LOG.warning("the captured graph cannot be saved, and the next start captures the model again: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink()

    def _path(self, facts: Facts) -> Path:
        return self._folder / f"graph-{_sha256(json.dumps(facts))[:40]}.json"

    def _facts(self, example: FlatMicrobatch, training: bool, open_sizes: Open) -> Facts:
        """The digest of each fact that a graph depends on, by its name in messages."""
        model, loss, device = self._request.model, self._request.loss, self._request.place.device.type
        trees = [tree for tree in (model, loss) if isinstance(tree, nn.Module)]
        flags = [f"{fqn}={module.training}" for tree in trees for fqn, module in tree.named_modules()]
        autocast = torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))
        varying = {path: sorted(dimensions) for path, dimensions in open_sizes.items()}
        found = {
            "the version of torch": torch.__version__,
            "the version of graphpp": _version(),
            "the device, the mesh or autocast": [device, _place(self._request.place), autocast],
            "parallel.param_dtype": str(self._request.options.parallel.param_dtype),
            "memory.outputs": self._request.options.memory.outputs,
            "memory.logits_tokens": self._request.options.memory.logits_tokens,
            "memory.word_parts": str(self._words),
            "the parameters and buffers": [line for tree in trees for line in tensor_lines(tree)],
            "training or evaluation": [training, *flags],
            "the microbatch": [*example.signature, varying, self._request.options.debug.dynamic is True],
            "an attribute, a global variable or code of the model or the loss": self._digest.hex(),
            **{f"the source file of {name}": text for name, text in sorted(_sources(model, loss))},
        }
        return {name: _sha256(json.dumps(fact)) for name, fact in found.items()}


def _header(facts: Facts, text: str) -> str:
    return json.dumps({"facts": facts, "sha256": _sha256(text)})


def _difference(folder: Path, facts: Facts) -> str:
    """How the most similar graph of a folder differs, as part of a message; empty without graphs."""
    others = []
    for path in folder.glob("graph-*.json"):
        try:
            with path.open() as file:
                theirs = json.loads(file.readline())["facts"]
            others.append([name for name in {**facts, **theirs} if facts.get(name) != theirs.get(name)])
        except (OSError, ValueError, KeyError, TypeError):  # damaged
            continue
    return f" ({' and '.join(min(others, key=len)[:3])} differ from those of the graph that is there)" if others else ""


def _place(place: RankPlace) -> list[Any]:
    """This rank's coordinates on the mesh dimensions whose ranks have different graphs."""
    meshes = {id(mesh): mesh for mesh in (place.mesh, place.expert_mesh) if mesh is not None}
    found = []
    for mesh in meshes.values():
        at = zip(mesh.mesh_dim_names or (), mesh.mesh.shape, mesh.get_coordinate() or (), strict=True)
        found += [each for each in at if each[0] in ("tp", "cp", "ep", "etp")]
    return found


def _sources(model: nn.Module, loss: Any) -> Iterator[tuple[str, str]]:
    """Python modules of the classes and functions in model and loss, with digests of their files."""
    modules = [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
    classes = {base for module in modules for base in type(module).__mro__}
    functions = [value for module in modules for value in vars(module).values() if callable(value)]
    functions += [hook for module in modules for kind in HOOKS for hook in getattr(module, kind).values()]
    own = [each for each in (*classes, *map(unwrapped, (*functions, loss))) if not comes_with_torch(each)]
    for name in {each.__module__ for each in own if hasattr(each, "__module__")}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and os.path.isfile(file):
            yield name, _source_digest(file)


@functools.cache
def _source_digest(file: str) -> str:
    """The digest of a source file at its first use: a later edit does not change this process's code."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def _version() -> str:
    """The digest of graphpp's own source files."""
    root = Path(__file__).parents[1]
    source = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        source.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return source.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
