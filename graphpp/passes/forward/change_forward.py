"""The ordered list of passes over an exported forward, before it is traced together with its backward.

Contract: `change_forward` rewrites the forward in place: attention without a mask that the positions prove causal, then the
head and its cross entropy as `ForwardOptions` asks. Raises `CaptureError`, with the user's source line, if a training has no
head that an option can change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import fx

from graphpp.errors import CaptureError
from graphpp.log import logger
from graphpp.passes.forward.causal_attention import causal_attention
from graphpp.passes.forward.chunk_logits import chunk_logits
from graphpp.passes.forward.cut_words import Inside, WordParts, cut_words
from graphpp.passes.forward.head_and_loss import Stays

_LOG = logger(__name__)
_REMEDY = "Give torch.nn.functional.cross_entropy the results of a linear layer, or leave the option out"


@dataclass(frozen=True)
class ForwardOptions:
    """`any_size`: no choice depends on a size. `logits_tokens`: as `memory.logits_tokens`. `word_parts`: the order in which
    parts of the words are computed (`memory.word_parts`)."""

    any_size: bool = False
    logits_tokens: int | None = None
    word_parts: WordParts | None = None


@dataclass(frozen=True)
class ForwardFacts:
    """The facts about an exported forward that its passes use.

    `prefix`: of the model's FQNs in the module. `line`: gives the user's source line of a node, "" if there is none. `inside`:
    makes the metadata of an operation inside a further module call. `autocast`: the dtype of autocast, under which the module
    will run (None: none).
    """

    prefix: str
    line: Callable[[fx.Node], str]
    inside: Inside
    autocast: torch.dtype | None


def change_forward(module: fx.GraphModule, options: ForwardOptions, about: ForwardFacts, *, training: bool) -> None:
    """Run the passes. An evaluation, which may return its logits, is no error for `logits_tokens`."""
    causal_attention(module, options.any_size)
    if options.word_parts is not None and options.logits_tokens is not None:
        both = "memory.word_parts, memory.logits_tokens"
        raise CaptureError(f"{both}: each makes another head of the model's: leave one of them out")
    if options.word_parts is not None:
        _cut_words(module, options.word_parts, about, training)
    if options.logits_tokens is not None:
        _chunk_logits(module, options.logits_tokens, about, training)


def _cut_words(module: fx.GraphModule, parts: WordParts, about: ForwardFacts, training: bool) -> None:
    weight = None if parts.weight is None else attrgetter(f"{about.prefix}.{parts.weight}")(module)
    try:
        others = cut_words(module, parts, about.inside, weight, training=training)
    except Stays as reason:
        first = "" if training else " (before the first step nothing says which head: give example=, or train a step first)"
        raise CaptureError(
            f"memory.word_parts: the words of this model's head cannot be cut: {_said(reason, about)}{first}. {_REMEDY}"
        ) from None
    if training and others:
        found = "; ".join(_said(each, about) for each in others)
        _LOG.warning("memory.word_parts: a cross entropy of the model or loss still has a whole head: %s", found)


def _said(reason: Stays, about: ForwardFacts) -> str:
    """The reason with the user's line, or with the operation where there is none."""
    line = about.line(reason.node) or ("" if reason.node.op == "output" else reason.node.name)
    return f"at {line} {reason}" if line else str(reason)


def _chunk_logits(module: fx.GraphModule, tokens: int, about: ForwardFacts, training: bool) -> None:
    rewritten, others = chunk_logits(module, tokens, about.autocast)
    found = [_said(each, about) for each in others]
    if training and rewritten and others:
        _LOG.warning("memory.logits_tokens: a cross entropy of the model or loss still has all logits: %s", "; ".join(found))
    if training and not rewritten:
        raise CaptureError(
            "memory.logits_tokens: no cross entropy of this model or loss can be computed for some tokens at a time: "
            f"{'; '.join(found) or 'none is called'}. {_REMEDY}"
        )
