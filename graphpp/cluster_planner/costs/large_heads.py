"""The costs of a model with another head, from its costs with a whole head: the last segment is the head and its loss.

- `with_word_parts` (`memory.word_parts`): the last segment becomes one segment for each part. If an embedding is tied to the
  head, the first segment is cut alike. Each part has its share of operations, bytes and parameters, and reads the input of the
  whole segment, which is taken to have no other operations. The shares leave out two numbers for each token, which travel from
  part to part, and their additions.
- `with_logits_tokens` (`memory.logits_tokens`): the forward of the last segment also computes the gradients of the head's input
  and parameters, which wait for the backward. Logits exist for some tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpp.cluster_planner.costs.model_costs import PHASES, ModelCosts, ParameterCosts, SegmentKind, Variant
from graphpp.cluster_planner.costs.operations import Counted, Operation, Size, summed
from graphpp.passes.forward.cut_words import HEAD, LOOKUP
from graphpp.runtime.program import Phase

_BACKWARD = PHASES.index(Phase.BACKWARD)
_WIDE = 4  # bytes of the logarithms and slopes of a logit


def with_word_parts(costs: ModelCosts, parts: int) -> ModelCosts:
    """`costs` of which `has_head` holds, with so many parts of the words."""
    last, tied = len(costs.starts) - 1, costs.ties_head
    cut = {last, *([0] if tied else [])}
    segments = [(at, part) for at in range(last + 1) for part in (range(parts) if at in cut else range(1))]
    number = {pair: new for new, pair in enumerate(segments)}

    def crossing(sizes: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(sizes[min(at, last - 1)] for at, _ in segments[:-1])

    def readers(old: Sequence[int], part: int) -> tuple[int, ...]:
        return tuple(number[at, part if at in cut else 0] for at in old)

    def name(at: int, part: int) -> str:
        return f"{costs.names[at]}.{HEAD if at else LOOKUP}[{part}]" if at in cut else costs.names[at]

    def parameters(each: ParameterCosts) -> list[ParameterCosts]:
        of_words = each.fqn == costs.head or set(each.readers) == {last}
        shares = range(parts) if of_words else range(1)
        elements = [each.elements * (part + 1) // len(shares) - each.elements * part // len(shares) for part in shares]
        return [
            replace(each, elements=own, readers=readers(each.readers, part), makers=readers(each.makers, part))
            for part, own in zip(shares, elements, strict=True)
        ]

    def variant(old: Variant) -> Variant:
        kinds, shares = list(old.kinds), {}
        for at in sorted(cut):
            shares[at] = len(kinds)
            kinds.append(_share(old.kinds[old.kind_of[at]], parts, costs.forward[at - 1] if at else ()))
        return Variant(tuple(kinds), tuple(shares.get(at, old.kind_of[at]) for at, _ in segments))

    return replace(
        costs,
        starts=tuple(costs.starts[at] + part for at, part in segments),
        names=tuple(name(*each) for each in segments),
        layers=tuple(number[at, 0] for at in costs.layers),
        variants={name: variant(each) for name, each in costs.variants.items()},
        forward=crossing(costs.forward),
        backward=crossing(costs.backward),
        parameters=tuple(part for each in costs.parameters for part in parameters(each)),
        buffers=tuple((nbytes, readers(old, 0)) for nbytes, old in costs.buffers),
        derived=tuple(_times(costs.derived[at], 1 / parts if at in cut else 1) for at, _ in segments) if costs.derived else (),
    )


def with_logits_tokens(costs: ModelCosts, tokens: int) -> ModelCosts:
    """`costs` of which `has_head` holds, with logits of so many tokens at one time."""
    last = len(costs.starts) - 1
    (weight,) = (each for each in costs.parameters if each.fqn == costs.head)

    def variant(old: Variant) -> Variant:
        kind = old.kinds[old.kind_of[last]]
        words = max((_words(one) for one, _ in kind.operations[0]), key=_amount)
        logits: Size = ((0, 1, 0, tokens * _amount(words) * (2 * _WIDE + weight.itemsize)),)
        kinds = (*old.kinds, _in_pieces(kind, costs.forward[last - 1], logits))
        return Variant(kinds, (*old.kind_of[:last], len(old.kinds)))

    return replace(costs, variants={name: variant(each) for name, each in costs.variants.items()})


def _in_pieces(kind: SegmentKind, given: Size, logits: Size) -> SegmentKind:
    """`given`: the segment's input, whose gradient is as large; `logits`: of some tokens, in all copies."""
    made = kind.made[_BACKWARD]
    waiting = summed([given, made])

    def scaled(size: Size) -> Counted:
        return ((Operation("memory", nbytes=_times(size, 2)), 1),)

    return replace(
        kind,
        operations=(kind.operations[0] + kind.operations[_BACKWARD], scaled(waiting), scaled(given), scaled(made)),
        peaks=((summed([waiting, logits]),), (_times(waiting, 2),), (summed([waiting, given]),), (_times(made, 2),)),
        read=(kind.read[0], (), (), ()),
        saved=waiting,
        kept=made,
        offloadable=(),
    )


def _words(operation: Operation) -> Size:
    """The side of a product that counts words; () if no side does."""
    return max((side for side in operation.sides if not any(rows for rows, *_ in side)), key=_amount, default=())


def _share(kind: SegmentKind, parts: int, given: Size) -> SegmentKind:
    """One part of a segment; `given`: the segment's input, which each part keeps for its backward."""

    def part(size: Size) -> Size:
        return _times(size, 1 / parts)

    def with_input(size: Size) -> Size:
        return summed([part(size), _times(given, 1 - 1 / parts)]) if size else size

    def operation(one: Operation) -> Operation:
        words = _words(one)
        sides = tuple(part(side) if side is words else side for side in one.sides)
        return replace(one, flops=part(one.flops), nbytes=part(one.nbytes), sides=sides, parts=tuple(map(part, one.parts)))

    return replace(
        kind,
        operations=tuple(tuple((operation(one), count) for one, count in phase) for phase in kind.operations),
        peaks=tuple(tuple(map(with_input, phase)) for phase in kind.peaks),
        read=tuple(map(part, kind.read)),
        made=tuple(map(part, kind.made)),
        saved=with_input(kind.saved),
        kept=with_input(kind.kept),
        offloadable=tuple(replace(each, nbytes=part(each.nbytes)) for each in kind.offloadable),
    )


def _times(size: Size, factor: float) -> Size:
    return tuple((rows, sharded, experts, factor * amount) for rows, sharded, experts, amount in size)


def _amount(size: Size) -> float:
    return sum(amount for *_, amount in size)
