"""Plans of tensor and expert parallelism: {FQN pattern: style}, as transformers and torch write them.

A pattern names a module or a parameter; `*` matches one part of an FQN, and the longest matching pattern wins. Raises
`GraphPPError` for an unknown style, and for a pattern that matches no parameter.
Styles: "colwise" shards the output features of a linear layer, "rowwise" its input features, an integer that dimension of the
weights. "colwise_gather_output" also gathers the output. "expert" and "grouped_gemm" give each rank some of the experts.
"replicate", "sequence" and styles of modules without own parameters ("moe_tp_experts") shard nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from graphpp.errors import GraphPPError

Plan = Mapping[str, str | int]

_OUTPUT_FEATURES, _INPUT_FEATURES = -2, -1  # of a weight [.., outputs, inputs]
_STYLES: Mapping[str, int | None] = {
    "colwise": _OUTPUT_FEATURES, "colwise_rep": _OUTPUT_FEATURES, "colwise_gather_output": _OUTPUT_FEATURES,
    "packed_colwise": _OUTPUT_FEATURES, "local_colwise": _OUTPUT_FEATURES, "local_packed_colwise": _OUTPUT_FEATURES,
    "rowwise": _INPUT_FEATURES, "rowwise_rep": _INPUT_FEATURES, "rowwise_split_input": _INPUT_FEATURES,
    "packed_rowwise": _INPUT_FEATURES, "local_rowwise": _INPUT_FEATURES, "local_packed_rowwise": _INPUT_FEATURES,
    "embedding_rowwise": -2, "embedding_colwise": -1,
    "replicate": None, "replicated_with_grad_allreduce": None, "sequence": None, "sequence_parallel": None,
    "local_params": None, "moe_tp_experts": None, "moe_identity_expert": None, "all_reduce": None, "mla_kv_a_proj": None,
    "gather": None, "local": None, "ep_router": None,
}  # fmt: skip
_GATHERED = ("colwise_rep", "colwise_gather_output", "embedding_colwise")
_EXPERTS = ("expert", "grouped_gemm", "ep_dispatch_experts")


@dataclass(frozen=True)
class ShardedParameters:
    """By FQN. `dims`: the dimension that tensor parallelism shards; `gathered`: parameters whose product is gathered;
    `experts`: the group (the module that contains the experts) of each expert parameter."""

    dims: Mapping[str, int] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    experts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], tensor_plan: Plan, expert_plan: Plan) -> ShardedParameters:
        dims, gathered = dict[str, int](), set[str]()
        for fqn, (_, style) in _chosen(shapes, tensor_plan, "tensor_plan", [*_STYLES, "an integer"]).items():
            dim = _dim(fqn, style, len(shapes[fqn]))
            if dim is not None:
                dims[fqn] = dim
                gathered |= {fqn} if style in _GATHERED else set()
        found = _chosen(shapes, expert_plan, "expert_plan", _EXPERTS)
        return cls(dims, frozenset(gathered), {fqn: matched for fqn, (matched, style) in found.items() if style in _EXPERTS})


def _dim(fqn: str, style: str | int, rank: int) -> int | None:
    dim = style if isinstance(style, int) else _STYLES[style]
    if rank == 1:  # a bias follows the output features
        dim = None if isinstance(style, int) or dim == _INPUT_FEATURES else 0 if dim is not None else None
    if dim is None:
        return None
    if not -rank <= dim < rank:
        raise GraphPPError(f"tensor_plan: {fqn} has {rank} dimensions, and the plan shards dimension {dim}")
    return dim % rank


def fitting(plan: Plan, fqns: Iterable[str]) -> Plan:
    """The entries that match a parameter: a model's own plan may name modules that only some of its sizes have."""
    names = list(fqns)
    return {pattern: style for pattern, style in plan.items() if fitting_fqns(pattern, names)}


def _shards(style: str | int) -> bool:
    """Whether a style shards parameters; other styles may name modules without parameters."""
    return isinstance(style, int) or _STYLES.get(style) is not None or style in _EXPERTS


def fitting_fqns(pattern: str, fqns: Iterable[str]) -> dict[str, str]:
    """The FQNs that a pattern matches, each with the matched module or parameter."""
    fits = re.compile(r"(.*\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+") + r"(?=\.|$)")
    return {fqn: match.group() for fqn in fqns if (match := fits.match(fqn))}


def _chosen(fqns: Iterable[str], plan: Plan, name: str, known: Iterable[str]) -> dict[str, tuple[str, str | int]]:
    """By FQN, the module that a pattern matches and its style."""
    known, found = list(known), dict[str, tuple[str, str | int]]()
    readable = {*known, *_STYLES, *_EXPERTS}
    for pattern, style in sorted(plan.items(), key=lambda item: item[0].count(".")):
        if not isinstance(style, int) and style not in readable:
            raise GraphPPError(f"{name}: the style of {pattern!r} is {style!r}: take one of {', '.join(known)}")
        matched = fitting_fqns(pattern, fqns)
        if not matched and _shards(style):
            raise GraphPPError(f"{name}: {pattern!r} fits no parameter of the model: give FQNs as in model.named_parameters()")
        for fqn, module in matched.items():
            found[fqn] = (module.rpartition(".")[0] if module == fqn else module, style)
    return found
