"""The shapes of a mesh: how many ranks each dimension has, for a number of GPUs.

Parameters are sharded over all data ranks, over the data ranks of one machine, or not at all. Ranks are numbered in the order
of the dimensions: neighbours along `tp` are on one machine, neighbours along `pp` are far apart. Ranks along `dp_replicate`,
`dp_shard` and `ep` train on different rows; `cp` divides rows, `tp` divides layers. Folded experts are spread over `ep`, `cp`
and `tp` together (`parallel.expert_mesh`); others only over `ep`, and `tp` divides each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import gcd, prod

from graphpp.arguments import COUNT, FLAG, require
from graphpp.errors import ScheduleError


@dataclass(frozen=True, order=True)
class MeshShape:
    """The ranks along each dimension of a mesh, outermost first. `folded`: experts are spread over `cp` and `tp` too."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            require(ScheduleError, name, COUNT, size)
        require(ScheduleError, "folded", FLAG, self.folded)

    @property
    def ranks(self) -> int:
        return prod(self.sizes().values())

    @property
    def data_ranks(self) -> int:
        """Ranks that train on different rows."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def shards(self) -> int:
        """Ranks that shard a non-expert parameter."""
        return self.dp_shard * self.ep

    @property
    def expert_ranks(self) -> int:
        """Ranks over which experts are spread."""
        return self.ep * (self.cp * self.tp if self.folded else 1)

    @property
    def shard_stride(self) -> int:
        """Distance of two neighbours among `shards`, in ranks."""
        return self.stride("ep")

    @property
    def copies(self) -> tuple[str, ...]:
        """The dimensions over which gradients of non-expert parameters are added, without those of shards."""
        return ("dp_replicate", "cp")

    @property
    def copies_of_experts(self) -> tuple[str, ...]:
        """The dimensions over which gradients of experts are added, without those of shards."""
        return ("dp_replicate",) if self.folded else self.copies

    @property
    def widest(self) -> int:
        """The most ranks of one collective."""
        return max(self.dp_replicate, self.shards, self.cp, self.tp, self.expert_ranks)

    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in SIZES}

    def stride(self, dimension: str) -> int:
        """Distance of two neighbours along a dimension, in ranks."""
        return prod(getattr(self, name) for name in SIZES[SIZES.index(dimension) + 1 :])

    def needed(self, *, sharded: bool = False) -> dict[str, int]:
        """The sizes that a mesh must have: all above 1; always `pp`; `dp_shard` if `sharded` or with `ep`. Beside a mesh of
        folded experts `dp_shard` has the ranks of `ep` too."""
        sizes = {**self.sizes(), **({"dp_shard": self.shards, "ep": 1} if self.folded else {})}
        always = {"pp"} | ({"dp_shard"} if sharded or self.ep > 1 else set())
        return {name: size for name, size in sizes.items() if size > 1 or name in always}

    def of_experts(self, *, sharded: bool = False) -> dict[str, int] | None:
        """The sizes of the mesh of folded experts; None for others."""
        if not self.folded:
            return None
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "ep": self.expert_ranks}
        always = {"pp", "ep"} | ({"dp_shard"} if sharded or self.ep > 1 or self.dp_shard > 1 else set())
        return {name: size for name, size in sizes.items() if size > 1 or name in always}

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name, size in replace(self, folded=False).needed().items()]
        also = " and ".join(name for name in ("cp", "tp") if getattr(self, name) > 1)
        return " x ".join(sizes) + (f", experts over {also} too" if self.folded else "")


SIZES = tuple(item.name for item in fields(MeshShape) if item.name != "folded")
"""The dimensions of a mesh, outermost first."""
_OPEN: Mapping[str, int] = {}


@dataclass(frozen=True)
class MeshLimits:
    """How far each dimension can divide a model. `stages`, `cp`: the most ranks or stages. `experts` (0: none), `tp`: numbers
    that the ranks along `ep` and `tp` must divide. `domain`: GPUs per machine, the limit of `tp`."""

    stages: int
    experts: int = 0
    tp: int = 1
    cp: int = 1
    domain: int = 8


def mesh_shapes(gpus: int, batch: int, limits: MeshLimits, fixed: Mapping[str, int] = _OPEN) -> Iterator[MeshShape]:
    """All shapes for these GPUs and rows, in a fixed order. `tp` and `cp` are powers of 2, as kernels expect. `fixed`: sizes by
    dimension, which only have to divide the GPUs."""
    for pp in _sizes("pp", gpus, limits.stages, fixed):
        for tp in _sizes("tp", gpus // pp if "tp" in fixed else gcd(gpus // pp, limits.tp), limits.domain, fixed):
            for cp in _sizes("cp", gpus // (pp * tp), limits.cp, fixed):
                data = gpus // (pp * tp * cp)
                usual = ("tp" in fixed or tp & (tp - 1) == 0) and ("cp" in fixed or cp & (cp - 1) == 0)
                if batch % data == 0 and usual:
                    yield from _with_data(MeshShape(pp=pp, cp=cp, tp=tp), data, limits, fixed)


def _with_data(shape: MeshShape, data: int, limits: MeshLimits, fixed: Mapping[str, int]) -> Iterator[MeshShape]:
    """The shape with its data ranks distributed over `dp_replicate`, `dp_shard` and `ep`."""
    for ep in _sizes("ep", data, max(1, limits.experts), fixed):
        if limits.experts % ep == 0:
            rest, within = data // ep, gcd(data // ep, max(1, limits.domain // (ep * shape.cp * shape.tp)))
            copies = fixed.get("dp_replicate")
            usual = {1, within, rest} if copies is None else {rest // copies} if rest % copies == 0 else set()
            for dp_shard in sorted(usual) if "dp_shard" not in fixed else _sizes("dp_shard", rest, rest, fixed):
                if copies in (None, rest // dp_shard):
                    found = MeshShape(shape.pp, rest // dp_shard, dp_shard, ep, shape.cp, shape.tp)
                    yield found
                    folded = replace(found, folded=True)
                    if folded.expert_ranks > ep and limits.experts and limits.experts % folded.expert_ranks == 0:
                        yield folded


def _sizes(name: str, number: int, most: int, fixed: Mapping[str, int]) -> Iterator[int]:
    """The fixed size of a dimension, or all up to `most`, of those that divide `number`."""
    tried = range(1, min(number, most) + 1) if name not in fixed else (fixed[name],)
    return (each for each in tried if number % each == 0)
