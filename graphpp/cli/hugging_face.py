"""Causal language models of transformers: built from a `config.json` with random weights, and random tokens for them.

- Only the folder's `config.json` is read. No code of the folder runs, and nothing is downloaded.
- The model is in training mode, without a key-value cache, in the configuration's dtype (default float32).
- Raises `GraphPPError` if transformers is missing, the configuration is unreadable, the model is of another kind, or its
  weights exceed the machine's memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphpp.arguments import COUNT, require
from graphpp.batch.microbatch import Microbatch
from graphpp.errors import GraphPPError
from graphpp.units import spell_bytes

_ROWS, _LENGTH = 2, 64
_MOST_TEXT = 300  # characters of a message of the library


def causal_model(folder: Path, *, meta: bool) -> nn.Module:
    """The model of the folder's `config.json`; with `meta` on the meta device."""
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as fault:  # OSError, ValueError, KeyError or the library's own
        raise GraphPPError(f"MODEL: {folder / 'config.json'} cannot be read: {_shortened(fault)}") from fault
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise GraphPPError(
            f"MODEL: {folder} has a {config.model_type}, and only causal language models can be built from a configuration: "
            "write a function that returns (model, loss, example), and name it as file.py:function"
        )
    config.use_cache = False
    empty = _built(transformers, folder, config, meta=True)
    if not meta:
        _check_memory(folder, empty)
    return empty if meta else _built(transformers, folder, config, meta=False)


def is_causal(model: nn.Module) -> bool:
    """Whether a model is a causal language model of transformers, for which `random_tokens` works."""
    config = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or config is None:
        return False
    known = _transformers().MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    return isinstance(model, known if isinstance(known, tuple) else (known,))


def random_tokens(model: nn.Module, rows: int | None, length: int | None) -> Microbatch:
    """`rows` x `length` tokens as `input_ids` and `labels`, int64, equal in every call; on the model's device.

    Raises `GraphPPError` for more tokens than the configuration has positions, which the meta device would not notice.
    """
    config: Any = model.config
    config = config.get_text_config()
    positions = max(0, getattr(config, "max_position_embeddings", None) or 0)  # 0: without limit; -1 in XLNet's
    rows, length = rows or _ROWS, length or min(_LENGTH, positions or _LENGTH)
    require(GraphPPError, "--batch", COUNT, rows)
    require(GraphPPError, "--length", COUNT, length)
    if 0 < positions < length:
        raise GraphPPError(f"--length: {length} tokens are more than the {positions} positions of the model: take fewer tokens")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    if device.type == "meta":
        tokens = torch.empty((rows, length), dtype=torch.int64, device="meta")
    else:
        tokens = torch.randint(config.vocab_size, (rows, length), generator=generator, device="cpu").to(device)
    return Microbatch(kwargs={"input_ids": tokens, "labels": tokens.clone()})


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
    try:
        import transformers  # takes seconds to load
    except ImportError as fault:
        raise GraphPPError("MODEL: a Hugging Face model needs the library: pip install transformers") from fault
    return transformers


def _built(transformers: Any, folder: Path, config: Any, *, meta: bool) -> nn.Module:
    try:
        with torch.device("meta" if meta else "cpu"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as fault:  # the library may raise anything for inconsistent numbers
        raise GraphPPError(f"MODEL: transformers cannot build the model of {folder}: {_shortened(fault)}") from fault
    return model.train()


def _check_memory(folder: Path, model: nn.Module) -> None:
    """Raise `GraphPPError` if the weights exceed the memory of the machine."""
    needed = sum(parameter.nbytes for parameter in model.parameters())
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > machine:
        sizes = f"take {spell_bytes(needed)}, and this machine has {spell_bytes(machine)}"
        raise GraphPPError(f"MODEL: the weights of {folder} {sizes}: take a configuration with fewer layers")


def _shortened(fault: Exception) -> str:
    """The beginning of the library's message, on one line."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text if len(text) <= _MOST_TEXT else f'{text[:_MOST_TEXT]}...'}"
