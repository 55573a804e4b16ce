"""The choices on which the price of a microbatch depends, and whether a model admits them."""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.arguments import COUNT, FLAG, NUMBER, Accepted, one_word, or_none, require
from graphpp.cluster_planner.costs.model_costs import Degrees, ModelCosts
from graphpp.errors import ScheduleError

_RECOMPUTE = Accepted(
    'None, "selective", "full", or a fraction above 0 and up to 1',
    lambda value: value in (None, "selective", "full") or (NUMBER.accepts(value) and 0 < value <= 1),  # type: ignore[operator]
)
_OVERLAPPED = Accepted(
    'a tuple of "tp", "ep" and "backward"',
    lambda value: isinstance(value, tuple) and all(each in ("tp", "ep", "backward") for each in value),
)
REDUCED = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of a gradient that is sent, by its dtype."""
_ACCEPTED = {
    "rows": COUNT, "tp": COUNT, "ep": COUNT, "cp": COUNT, "folded": FLAG, "recompute": _RECOMPUTE, "sequence": FLAG,
    "compiled": FLAG, "overlapped": _OVERLAPPED, "chosen": or_none(COUNT), "casts": one_word("step", "computation", "shards"),
    "reduce_dtype": or_none(one_word(*REDUCED)), "in_place": FLAG, "single": FLAG, "sum_order": one_word("ranks", "any"),
}  # fmt: skip


@dataclass(frozen=True)
class Deployment:
    """The choices on which a price depends.

    `rows`: of a microbatch; `tp`, `ep`, `cp`: degrees of parallelism; `folded`: experts are spread over all three, and none is
    divided (`parallel.expert_mesh`). `recompute`: a fraction is of the bytes saved without
    recomputation; its price interpolates between the three kinds (an estimate). `sequence`: with `tp`, work on tokens that the
    plan does not shard also divides by `tp` (sequence parallelism), except attention. `optimizer`: as `memory.optimizer`, for
    float32 parameters. `compiled`: pointwise operators, reductions and look-ups run in fused kernels, as Inductor makes them;
    otherwise each operator is a kernel of its own, and the host launches one after the other. `overlapped`: exchanges that run
    beside computations: as in other systems those of "tp" but for one rank's part, and 90 % of those of "ep"; as in graphpp
    those of a "backward" beside its weight gradients.
    `chosen`: the experts of a token, in a system that sends a token once to each machine of its experts, as DeepEP does (None:
    once to each expert). `casts`: when values of weights alone, such as weights in float8, are computed: once per "step" where
    whole stages are kept, as in graphpp and Transformer Engine; in each "computation", as in torchao; or of "shards", before
    they are gathered, in float8. `reduce_dtype`: in which gradients add up over microbatches, and are sent over data ranks
    (None: float32, and with `keep=0` that of the computation). `in_place`: gradients are reduced where they add up, as by
    Megatron's distributed optimizer, and shards have none of their own. `single`: the host launches each expert's product by
    itself, as in Transformer Engine, in place of one kernel for all. `sum_order`: of gradients over copies, as
    `Parallel(sum_order=)`. Raises `ScheduleError`.
    """

    rows: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    folded: bool = False
    recompute: str | float | None = None
    sequence: bool = True
    optimizer: str | float = "adamw"
    compiled: bool = True
    overlapped: tuple[str, ...] = ()
    chosen: int | None = None
    casts: str = "step"
    reduce_dtype: str | None = None
    in_place: bool = False
    single: bool = False
    sum_order: str = "ranks"

    def __post_init__(self) -> None:
        for name, accepted in _ACCEPTED.items():
            require(ScheduleError, name, accepted, getattr(self, name))


def check_degrees(costs: ModelCosts, deployment: Deployment) -> None:
    """Raise `ScheduleError` for degrees that the model does not admit."""
    if deployment.cp > 1 and not costs.attentions:
        raise ScheduleError("cp: the model has no fused attention (scaled_dot_product_attention) whose keys could be exchanged")
    if deployment.folded and deployment.tp > 1 and not deployment.sequence:
        raise ScheduleError("folded: ranks along tp send other tokens to the experts: leave sequence=False out")
    degrees = Degrees(1.0, deployment.tp, deployment.ep, deployment.cp, folded=deployment.folded)
    tensor, experts = ("tp", deployment.tp, costs.tensor_ranks), ("ep", degrees.expert_ranks, costs.expert_ranks)
    for (name, ranks, most), plan in ((tensor, "tensor_plan"), (experts, "expert_plan")):
        if ranks > 1 and not most:
            raise ScheduleError(f"{name}: the costs were made without {plan}= that shards parameters of the model: give one")
        if most % ranks:
            raise ScheduleError(f"{name}: take a divisor of {most}, got {ranks}, which does not divide all that {plan}= shards")
