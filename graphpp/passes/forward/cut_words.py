"""Cut the words of a head, and of an embedding that is tied to it, into parts that stages of their own can compute.

Contract of `cut_words(module, parts, ..)`
- The weight and bias of the head become one parameter for each part of the words (`runtime/parameter_rows.py`). Each part is a
  call `words0`, `words1`, .. within the head's module call, in the order of `parts.head`, so that a split may start stages
  there.
- A head whose results only a cross entropy reads (`head_and_loss.py`): a part computes its logits, their log-sum-exp, and the
  logit of each target that is among its words. These two numbers for each token travel on to the next part, which adds its own.
  So no logits leave a part, and the loss is exact: log(sum exp) of all words minus the target's logit, computed in at least 32
  bits. A target that is no word raises `IndexError`, as in torch.
- Another head (an evaluation, which returns logits): each part computes its logits, and the last one joins them.
- An embedding with the head's weight: a part looks up the tokens among its words, and adds them to the sum of earlier parts.
- `Stays` for any other use of the weight or bias.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from graphpp.passes.forward.head_and_loss import (
    LINEAR,
    LOSS,
    HeadAndLoss,
    Stays,
    args_of,
    head_of,
    like,
    rows_before_head,
)
from graphpp.runtime.parameter_rows import rows_name, rows_of

_EMBEDDING = torch.ops.aten.embedding.default
Inside = Callable[[fx.Node, str], dict[str, Any]]
"""The metadata of an operation inside a call of this name within the innermost module call of a node."""


@dataclass(frozen=True)
class WordParts:
    """The number of each part of the words, in the order of execution: of the head's stages, and of the embedding's.

    `weight`: the FQN of the head's weight; None: the weight of the linear layer before the cross entropy.
    """

    head: tuple[int, ...]
    embedding: tuple[int, ...]
    weight: str | None = None


def cut_words(module: fx.GraphModule, parts: WordParts, inside: Inside, weight: Tensor | None) -> None:
    """Rewrite an exported forward in place. `weight`: the head's, a parameter of `module`; None: found by the loss.

    Raises `Stays` if there is no such head, or its weight has another use.
    """
    heads, reasons = {}, []
    for loss in [node for node in module.graph.nodes if node.target is LOSS]:
        try:
            found = head_of(loss)
            heads[found.linear] = found
        except Stays as reason:
            reasons.append(reason)
    if weight is None:
        if not heads:
            none = "no cross entropy over a linear layer is called (train a step before pipe.eval)"
            raise reasons[0] if reasons else Stays(module.graph.output_node(), none)
        weight = _tensor(module, next(iter(heads.values())).operands[1])
    if weight is None:
        raise Stays(next(iter(heads)), "the head's weight is computed, and is no parameter of the model")
    cut = _Cut(module, parts, inside)
    linear = None
    for user, operand in [(user, node) for node in _reads(module, weight) for user in node.users]:
        if user.target is LINEAR and args_of(user)[1] is operand and linear is None:
            linear = user
        elif user.target is _EMBEDDING:
            cut.embedding(user)
        else:
            raise Stays(user, f"{user.target} reads the head's weight, of which each rank has a part of the words")
    if linear is not None:
        cut.loss(heads[linear]) if linear in heads else cut.logits(linear)
    module.graph.eliminate_dead_code()
    cut.drop_whole()


def _tensor(module: fx.GraphModule, node: fx.Node | None) -> Tensor | None:
    """The parameter that a node reads."""
    if node is None or node.op != "get_attr":
        return None
    found = operator.attrgetter(str(node.target))(module)
    return found if isinstance(found, nn.Parameter) else None


def _reads(module: fx.GraphModule, tensor: Tensor) -> list[fx.Node]:
    return [node for node in module.graph.find_nodes(op="get_attr") if _tensor(module, node) is tensor]


@dataclass
class _Cut:
    """Rewrites single operations; parts of one parameter are made once."""

    module: fx.GraphModule
    parts: WordParts
    inside: Inside

    def __post_init__(self) -> None:
        self._targets: dict[tuple[int, range], str] = {}
        self._whole: dict[int, Tensor] = {}

    def drop_whole(self) -> None:
        """Take the whole parameters out of the module, under all their names: a trace has all its parameters as inputs."""
        for owner in self.module.modules():
            for name in [name for name, each in owner.named_parameters(recurse=False) if id(each) in self._whole]:
                del owner._parameters[name]

    def loss(self, found: HeadAndLoss) -> None:
        graph, linear, loss = self.module.graph, found.linear, found.loss
        wide = torch.promote_types(linear.meta["val"].dtype, torch.float32)
        with graph.inserting_before(loss):
            rows, scale = rows_before_head(graph, found)
            sums: Any = None
            for call, words, part in self._each(linear, self.parts.head, found.operands[1:]):
                options = (words.start, scale, wide, bool(found.smoothing))
                sums = call(graph.call_function(_sums_with_part, (rows, *part, found.target, sums, options)))
            rules = (found.words, found.mean, found.ignore_index, found.smoothing, loss.meta["val"].dtype)
            value = like(loss, graph.call_function(_loss_of_sums, (sums, found.target, *rules)))
        loss.replace_all_uses_with(value)

    def logits(self, linear: fx.Node) -> None:
        graph, (hidden, weight, bias, *_) = self.module.graph, (*args_of(linear), None)
        with graph.inserting_before(linear):
            made: dict[int, fx.Node] = {}
            call: Callable[[fx.Node], fx.Node]
            for call, words, part in self._each(linear, self.parts.head, (weight, bias)):
                made[words.start] = call(graph.call_function(LINEAR, (hidden, *part)))
            value = call(graph.call_function(torch.cat, ([made[first] for first in sorted(made)], -1)))
        value.meta["val"] = linear.meta["val"]
        linear.replace_all_uses_with(value)

    def embedding(self, node: fx.Node) -> None:
        given: Any = (*args_of(node), *(-1, False, False)[len(args_of(node)) - 2 :])
        weight, tokens, padding, by_frequency, sparse = given
        if by_frequency or sparse:
            raise Stays(node, "the embedding that shares the head's weight has scale_grad_by_freq or sparse gradients")
        if not self.parts.embedding:
            raise Stays(node, "an embedding shares the head's weight, and the schedule's first stages are not one on each rank")
        total: Any = None
        with self.module.graph.inserting_before(node):
            for call, words, (part, _) in self._each(node, self.parts.embedding, (weight, None)):
                options = (words.start, padding, weight.meta["val"].shape[0])
                total = call(self.module.graph.call_function(_sum_with_part, (tokens, part, total, *options)))
        total.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(total)

    def _each(
        self, node: fx.Node, order: tuple[int, ...], operands: Any
    ) -> Iterator[tuple[Callable[[fx.Node], fx.Node], range, list[fx.Node | None]]]:
        """For each part: a function that puts an operation into the part's call, the words, and the part of each operand."""
        words = operands[0].meta["val"].shape[0]
        if words < len(order) or len(rows_of(words, len(order), len(order) - 1)) == 0:
            raise Stays(node, f"{words} words cannot be cut into {len(order)} parts")
        for at, number in enumerate(order):
            meta, rows = self.inside(node, f"words{at}"), rows_of(words, len(order), number)

            def call(made: fx.Node, meta: dict[str, Any] = meta) -> fx.Node:
                made.meta = dict(meta)
                return made

            yield call, rows, [operand and call(self._part(node, operand, rows)) for operand in operands]

    def _part(self, node: fx.Node, operand: fx.Node, rows: range) -> fx.Node:
        """Reads rows of a parameter, which become a parameter of the module."""
        whole = _tensor(self.module, operand)
        if whole is None:
            raise Stays(node, "the head's weight or bias is computed, and is no parameter of the model")
        if any(user is not node for read in _reads(self.module, whole) for user in read.users) and whole.dim() == 1:
            raise Stays(node, "the head's bias is read by other operations too")
        self._whole[id(whole)] = whole
        key = id(whole), rows
        if key not in self._targets:
            path, _, name = str(operand.target).rpartition(".")
            part = nn.Parameter(whole.detach()[rows.start : rows.stop].clone(), requires_grad=whole.requires_grad)
            self.module.get_submodule(path).register_parameter(rows_name(name, rows), part)
            self._targets[key] = f"{path}.{rows_name(name, rows)}" if path else rows_name(name, rows)
        return self.module.graph.get_attr(self._targets[key])


def _sums_with_part(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    before: tuple[Tensor, ...] | None,
    options: tuple[int, float, torch.dtype, bool],
) -> tuple[Tensor, ...]:
    """For each row, over the words up to this part's: the log-sum-exp, the target's logit, and with smoothing the sum.

    `rows` [n, d], `weight` [words, d], `target` [n], any words. `options`: the part's first word, the factor of the logits,
    the dtype of the results, whether the loss is smoothed.
    """
    first, scale, dtype, smooths = options
    logits = F.linear(rows, weight, bias).to(dtype)
    logits = logits if scale == 1 else logits * scale
    place = target - first
    mine = (place >= 0) & (place < weight.shape[0])
    score = logits.gather(1, place.clamp(0, weight.shape[0] - 1)[:, None])[:, 0].where(mine, 0)
    found = (logits.logsumexp(-1), score, *([logits.sum(-1)] if smooths else []))
    if before is None:
        return found
    return (torch.logaddexp(before[0], found[0]), *(one + other for one, other in zip(before[1:], found[1:], strict=True)))


def _loss_of_sums(
    sums: tuple[Tensor, ...],
    target: Tensor,
    words: int,
    mean: bool,
    ignore_index: int,
    smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    """The cross entropy from the sums over all words."""
    (total, score, *rest), valid = sums, target != ignore_index
    losses = total - score - score.new_zeros(words)[target.where(valid, 0)]  # zeros; raises for a target that is no word
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (total - rest[0] / words)
    loss = losses.where(valid, 0).sum()
    return (loss / valid.sum() if mean else loss).to(dtype)


def _sum_with_part(tokens: Tensor, weight: Tensor, before: Tensor | None, first: int, padding: int, words: int) -> Tensor:
    """The embeddings of the tokens among this part's words, zero elsewhere, plus those of earlier parts."""
    place = tokens - first
    if before is None:
        place = place + place.new_zeros(words)[tokens]  # zeros; raises for a token that is no word
    mine = (place >= 0) & (place < weight.shape[0])
    own = padding - first if 0 <= padding - first < weight.shape[0] else None
    found = F.embedding(place.clamp(0, weight.shape[0] - 1), weight, own).where(mine[..., None], 0)
    return found if before is None else before + found
