"""Cut the words of a head, and of an embedding that is tied to it, into parts that stages of their own can compute.

Contract of `cut_words(module, parts, ..)`
- The weight and bias of the head become one parameter for each part of the words (`runtime/parameter_rows.py`). Each part is a
  call `words[0]`, `words[1]`, .. within the head's module call, in the order of `parts.head`, so that a split may start stages
  there. Of several heads the one with most words is cut, and the others are returned with their reasons.
- A head whose results only a cross entropy reads (`head_and_loss.py`): a part computes its logits, their log-sum-exp, and the
  logit of each target that is among its words. These two numbers for each token travel on to the next part, which adds its own.
  So no logits leave a part, and the loss is exact: log(sum exp) of all words minus the target's logit, computed in at least 32
  bits. A target or token that is no word raises `IndexError`, as in torch.
- The head of an evaluation, which may return logits: each part computes its logits, and the last one joins them.
- An embedding with the head's weight, called once: a part `lookup[0]`, .. looks up the tokens among its words, and adds them to
  the sum of earlier parts.
- `Stays` for any other use of the weight or bias.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
HEAD, LOOKUP = "words", "lookup"  # the calls of the parts, with their numbers in brackets, which no module's name has
Inside = Callable[[fx.Node, str], dict[str, Any]]
"""Makes the metadata of an operation inside a call of this name within the innermost module call of a node."""


@dataclass(frozen=True)
class WordParts:
    """The number of each part of the words, in the order of execution: of the head's stages, and of the embedding's.

    `weight`: the FQN of the head's weight; None: the weight of the linear layer before the cross entropy.
    """

    head: tuple[int, ...]
    embedding: tuple[int, ...]
    weight: str | None = None


def cut_words(
    module: fx.GraphModule, parts: WordParts, inside: Inside, weight: Tensor | None, *, training: bool
) -> list[Stays]:
    """Rewrite an exported forward in place; returns why other cross entropies have whole heads.

    `weight`: the head's, a parameter of `module`; None: found by the loss. Raises `Stays` if there is no such head, or its
    weight has another use.
    """
    heads, others = dict[fx.Node, HeadAndLoss](), list[Stays]()
    for loss in [node for node in module.graph.nodes if node.target is LOSS]:
        try:
            found = head_of(loss)
            heads[found.linear] = found
        except Stays as reason:
            others.append(reason)
    if weight is None:
        if not heads:
            raise others[0] if others else Stays(module.graph.output_node(), "no cross entropy over a linear layer is called")
        weight = _tensor(module, max(heads.values(), key=lambda each: int(each.words)).operands[1])
    if weight is None:
        raise Stays(next(iter(heads)), "the head's weight is computed, and is no parameter of the model")
    linear = _Cut(module, parts, inside).head(weight, heads, training=training, others=others)
    return others + [Stays(each, "another head has more words") for each in heads if each is not linear]


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
    _targets: dict[tuple[int, range], str] = field(default_factory=dict)
    _whole: dict[int, Tensor] = field(default_factory=dict)

    def head(
        self, weight: Tensor, heads: Mapping[fx.Node, HeadAndLoss], *, training: bool, others: Sequence[Stays]
    ) -> fx.Node | None:
        """Cut the head and the embedding with this weight; returns the head's linear layer, if the forward calls one."""
        uses = [(user, read) for read in _reads(self.module, weight) for user in read.users]
        linears = [user for user, read in uses if user.target is LINEAR and args_of(user)[1] is read]
        embeddings = [user for user, _ in uses if user.target is _EMBEDDING]
        for user in [*linears[1:], *embeddings[1:], *(user for user, _ in uses if user not in (*linears, *embeddings))]:
            raise Stays(user, f"{user.target} reads the head's weight once more, of which each rank has a part of the words")
        for embedding in embeddings:
            self.embedding(embedding)
        for linear in linears:
            if linear in heads:
                self.loss(heads[linear])
            elif training:
                raise next(iter(others), Stays(linear, "other operations than a cross entropy read its results"))
            else:
                self.logits(linear)
        self.module.graph.eliminate_dead_code()
        self.drop_whole()
        return next(iter(linears), None)

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
            for place, words, part in self._each(linear, HEAD, self.parts.head, found.operands[1:]):
                options = (words.start, scale, wide, bool(found.smoothing))
                sums = place(graph.call_function(_sums_with_part, (rows, *part, found.target, sums, options)))
            rules = (found.words, found.mean, found.ignore_index, found.smoothing, loss.meta["val"].dtype)
            value = like(loss, graph.call_function(_loss_of_sums, (sums, found.target, *rules)))
        loss.replace_all_uses_with(value)

    def logits(self, linear: fx.Node) -> None:
        graph, (hidden, weight, bias, *_) = self.module.graph, (*args_of(linear), None)
        with graph.inserting_before(linear):
            made: dict[int, fx.Node] = {}
            place: Place
            for place, words, part in self._each(linear, HEAD, self.parts.head, (weight, bias)):
                made[words.start] = place(graph.call_function(LINEAR, (hidden, *part)))
            value = place(graph.call_function(torch.cat, ([made[first] for first in sorted(made)], -1)))
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
            for place, words, (part, _) in self._each(node, LOOKUP, self.parts.embedding, (weight, None)):
                options = (words.start, padding, weight.meta["val"].shape[0])
                total = place(self.module.graph.call_function(_sum_with_part, (tokens, part, total, *options)))
        total.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(total)

    def _each(
        self, node: fx.Node, name: str, order: tuple[int, ...], operands: tuple[fx.Node, fx.Node | None]
    ) -> Iterator[tuple[Place, range, list[fx.Node | None]]]:
        """For each part: the place of its operations, the words, and the part of the weight and of the bias."""
        weight, bias = operands
        words = weight.meta["val"].shape[0]
        if words < len(order) or len(rows_of(words, len(order), len(order) - 1)) == 0:
            raise Stays(node, f"{words} words cannot be cut into {len(order)} parts")
        if bias is not None and any(user is not node for user in self._users(bias)):
            raise Stays(node, "the head's bias is read by other operations too")
        for at, number in enumerate(order):
            place, rows = Place(self.inside(node, f"{name}[{at}]")), rows_of(words, len(order), number)
            yield place, rows, [each and place(self._part(node, each, rows)) for each in operands]

    def _users(self, operand: fx.Node) -> list[fx.Node]:
        whole = _tensor(self.module, operand)
        return [] if whole is None else [user for read in _reads(self.module, whole) for user in read.users]

    def _part(self, node: fx.Node, operand: fx.Node, rows: range) -> fx.Node:
        """Reads rows of a parameter, which become a parameter of the module."""
        whole = _tensor(self.module, operand)
        if whole is None:
            raise Stays(node, "the head's weight or bias is computed, and is no parameter of the model")
        path, _, name = str(operand.target).rpartition(".")
        self._whole[id(whole)] = whole
        key = id(whole), rows
        if key not in self._targets:
            part = nn.Parameter(whole.detach()[rows.start : rows.stop].clone(), requires_grad=whole.requires_grad)
            self.module.get_submodule(path).register_parameter(rows_name(name, rows), part)
            self._targets[key] = f"{path}.{rows_name(name, rows)}" if path else rows_name(name, rows)
        return self.module.graph.get_attr(self._targets[key])


@dataclass(frozen=True)
class Place:
    """Puts operations into the call of a part."""

    meta: dict[str, Any]

    def __call__(self, node: fx.Node) -> fx.Node:
        node.meta = dict(self.meta)
        return node


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
    place = target.to(torch.int64) - first
    mine = (place >= 0) & (place < weight.shape[0])
    score = logits.gather(1, place.clamp(0, weight.shape[0] - 1)[:, None])[:, 0].where(mine, 0)
    found = (_log_sum_exp(logits), score, *([logits.sum(-1)] if smooths else []))
    if before is None:
        return found
    return (torch.logaddexp(before[0], found[0]), *(one + other for one, other in zip(before[1:], found[1:], strict=True)))


def _log_sum_exp(logits: Tensor) -> Tensor:
    """As `logsumexp` over the words; of a row that is all -inf a finite number without gradient, where torch's is nan."""
    limits = torch.finfo(logits.dtype)
    most = logits.detach().amax(-1, keepdim=True).clamp(min=limits.min)
    return most[:, 0] + (logits - most).exp().sum(-1).clamp(min=limits.tiny).log()


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
    zeros = score.new_zeros(words).index_select(0, target.where(valid, 0))  # raises for a target that is no word
    losses = total - score - zeros
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (total - rest[0] / words)
    loss = losses.where(valid, 0).sum()
    return (loss / valid.sum() if mean else loss).to(dtype)


def _sum_with_part(tokens: Tensor, weight: Tensor, before: Tensor | None, first: int, padding: int, words: int) -> Tensor:
    """The embeddings of the tokens among this part's words, zero elsewhere, plus those of earlier parts."""
    place = tokens - first
    if before is None:
        place = place + place.new_zeros(words).index_select(0, tokens.flatten()).view_as(tokens)  # raises for no word
    mine = (place >= 0) & (place < weight.shape[0])
    own = padding - first if 0 <= padding - first < weight.shape[0] else None
    found = F.embedding(place.clamp(0, weight.shape[0] - 1), weight, own).where(mine[..., None], 0)
    return found if before is None else before + found
