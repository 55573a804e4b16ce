"""Costs of models as other systems run them, from those of graphpp's capture: experts in float8, inputs that products save, and
losses without a copy in float32."""

from __future__ import annotations

from dataclasses import replace

from graphpp.cluster_planner.costs.model_costs import ModelCosts, SegmentKind, Variant
from graphpp.cluster_planner.costs.operations import Operation, Size, summed

_PASSES = {"tensorwise": 6, "rowwise": 4}  # bytes an element: reads for the scale and the cast, or for both; two orders written
_SCALING = (0, 2, 0, 4)
"""Bytes an element of the kernels by which Transformer Engine 2.7 and 2.9 scale a tensor: they zero its maximum, find it, make
the scale, and cast in two orders (`Float8CurrentScalingQuantizer::quantize_impl`). Each expert has its own, since only delayed
scaling has a kernel for several tensors (`multi_tensor_quantize_impl`)."""


def experts_in_float8(costs: ModelCosts, recipe: str, single: int = 0) -> ModelCosts:
    """Experts in float8, too, which torchao's conversion leaves out: each product has the passes that scale its rows.
    Weights are scaled once per step, and a product for the gradient of weights has operands that are scaled already. `recipe`:
    "tensorwise" or "rowwise"; `single`: how many experts' rows are scaled by kernels of their own (0: all by one)."""
    pieces = ((0, 0, 1, float(single)),) if single else ()

    def scaled(one: Operation) -> list[Operation]:
        left, right = one.sides[0], one.sides[1][0]
        if not any(term[0] for term in left):
            return []
        each = tuple((r - right[0], s - right[1], e - right[2], work / 2 / right[3]) for r, s, e, work in one.flops)
        kernels = [tuple((*powers, width * elements) for *powers, elements in each) for width in _SCALING if single]
        kernels = kernels or [tuple((*powers, _PASSES[recipe] * elements) for *powers, elements in each)]
        return [Operation("memory", nbytes=size, pieces=pieces) for size in kernels]

    def changed(kind: SegmentKind) -> SegmentKind:
        phases = [list(phase) for phase in kind.operations]
        for phase in phases:
            grouped = [(one, n) for one, n in phase if one.grouped]
            phase[:] = [(replace(one, dtype="float8_e4m3fn") if one.grouped else one, n) for one, n in phase]
            phase += [(each, n) for one, n in grouped for each in scaled(one)]
        return replace(kind, operations=tuple(map(tuple, phases)))

    variants = {name: replace(each, kinds=tuple(map(changed, each.kinds))) for name, each in costs.variants.items()}
    parameters = tuple(replace(each, float8=each.float8 or each.expert) for each in costs.parameters)
    return replace(costs, variants=variants, parameters=parameters)


def saved_by_fused_kernels(costs: ModelCosts) -> ModelCosts:
    """A model whose products save their inputs, as `Linear` and `LayerNormLinear` of Transformer Engine do: the quantized ones
    where they compute in float8. Norms and activations save their inputs alone, as with a compiler."""

    def changed(kind: SegmentKind) -> SegmentKind:
        width = 0.5 if any(one.dtype.startswith("float8") for one, _ in kind.operations[0]) else 1.0
        more = tuple((*powers, width * amount) for *powers, amount in kind.operands)
        return replace(kind, saved=summed([kind.saved, more]))

    plain = costs.variants[None]
    return replace(costs, variants={**costs.variants, None: replace(plain, kinds=tuple(map(changed, plain.kinds)))})


def with_fused_loss(costs: ModelCosts) -> ModelCosts:
    """A model whose last segment has logits and their gradients in the dtype of the model alone: a compiled loss, or that of
    Transformer Engine, makes no copy in float32."""
    last = len(costs.starts) - 1

    def changed(own: Variant) -> Variant:
        kinds = (*own.kinds, _without_copies(own.kinds[own.kind_of[last]]))
        return Variant(kinds, (*own.kind_of[:last], len(own.kinds)))

    return replace(costs, variants={name: changed(own) for name, own in costs.variants.items()})


_LOGITS = (2, 4, 4, 2)  # bytes of a logit that are live in each phase: itself, its gradient, or both


def _without_copies(kind: SegmentKind) -> SegmentKind:
    head = max((one for one, _ in kind.operations[0] if one.sides), key=lambda one: sum(term[3] for term in one.flops))
    logits = 2 * head.sides[0][0][3] * head.sides[1][0][3]

    def limited(size: Size, most: int) -> Size:
        """The size with at most so many bytes of each logit: what is left of whole copies is of other values."""
        own = ((*powers, amount - max(0.0, amount // logits - most / 2) * logits) for *powers, amount in size)
        return tuple(new if new[0] else old for new, old in zip(own, size, strict=True))

    peaks = (tuple(limited(size, most) for size in sizes) for sizes, most in zip(kind.peaks, _LOGITS, strict=True))
    return replace(kind, peaks=tuple(peaks), saved=limited(kind.saved, _LOGITS[0]))
