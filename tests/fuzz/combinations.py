"""Combinations of a model, a mesh, a schedule and options, each drawn from one number.

Contract: `combination(seed)` is plain data, the same on every run, and `repr` of a `Combination` is Python that makes it again.
About one in eight is drawn without regard to what fits together: such a combination may be refused. `smaller` lists the
combinations that differ in one step towards the defaults, for a failure to be shrunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from math import prod
from random import Random
from typing import Any, TypeVar

import torch

import graphpp
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.placement import usual_stages
from graphpp.schedules.table.schedule import Schedule
from tests.fuzz.layers import KINDS as LAYERS
from tests.schedules.tables import ON_A_V, ONE_PER_RANK, rows_for
from tests.sharding import Mesh

T = TypeVar("T")
DIMS = ("pp", "dp_replicate", "dp_shard")
OWN = {"decoder": "tp", "mixture": "ep", "long": "cp"}  # the dimension that only this kind of model can be spread over
STACKS = 16  # different models of mixed layers
KINDS = (*["mixed"] * 26, "llama", "gpt2", *["decoder", "mixture", "long"] * 2)
BETWEEN = ("eval", "optimizer", "keep", "clip", "recapture", "gather")
FUNCTIONS: dict[str, Any] = {
    "cheap()": lambda node: "mm" not in str(node.target),
    "large()": lambda meta: meta.nbytes > 400,
    "unit()": lambda node: 1e-6,
    "same()": lambda module, examples: module,
    "Recompute()": graphpp.Recompute(layers=(), free=False),
    "Recompute(w)": graphpp.Recompute(nodes="selective", weight_grad=True),
    "Offload()": graphpp.Offload(0.5, least_bytes=0, ahead=2),
    "layers": ["layers.0", "layers.1"],
    "float32": torch.float32,
    "float64": torch.float64,
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "memory.recompute": ("full", "selective", 0.2, 0.5, 0.9, "cheap()", "Recompute()", "Recompute(w)", "layers"),
    "memory.offload": (True, 0.5, "large()", "Offload()"),
    "memory.cap": (10**9,),
    "memory.optimizer": ("sgd", "momentum", 12),
    "memory.release": (False,),
    "gradients.reduction": ("sum", "rows", "rows"),
    "gradients.dtype": ("float32", "float64"),
    "gradients.fused": (True, False),
    "parallel.check_data": (0, 1),
    "parallel.timeout": (50.0,),
    "parallel.op_costs": ("unit()",),
    "parallel.replica_buffers": ("average", "broadcast"),
    "parallel.replica_values": ("broadcast",),
    "parallel.sum_order": ("any",),
    "parallel.keep": (0, 1, 2),
    "parallel.param_dtype": ("float64",),
    "parallel.reduce_dtype": ("float64", "float32"),
    "debug.audit": (0, 1),
    "debug.dynamic": (True, False),
    "debug.max_graphs": (1,),
    "backend": (*["same()"] * 20, "inductor"),
}
RARE = {"parallel.replica_values": "dp_replicate", "parallel.sum_order": "dp_", "parallel.keep": "dp_shard"}
RARE |= {"parallel.param_dtype": "dp_shard", "parallel.reduce_dtype": "dp_shard"}


@dataclass(frozen=True)
class Layout:
    """A mesh (empty: the world is one pipeline), a schedule (a number: a random table), and where the stages start."""

    mesh: tuple[tuple[str, int], ...] = ()
    schedule: str | int = "auto"
    stages: int = 1
    split: tuple[str, ...] | str | None = None

    @property
    def as_mesh(self) -> Mesh:
        return Mesh(tuple(size for _, size in self.mesh), tuple(name for name, _ in self.mesh))

    def size(self, name: str) -> int:
        return self.as_mesh.size(name)

    @property
    def replicas(self) -> int:
        """How many batches a step takes; ranks along `cp` share one."""
        return self.as_mesh.replicas // self.size("cp")

    def pp(self, ranks: int) -> int:
        return self.size("pp") if self.mesh else ranks

    def table(self, ranks: int, microbatches: int) -> Schedule | str:
        """A name, or the random table of the number."""
        if isinstance(self.schedule, str):
            return self.schedule
        rows = rows_for(Random(self.schedule), self.pp(ranks), self.stages, microbatches, self.size("dp_shard") > 1)
        return Schedule.of(rows, name=f"random {self.schedule}", stages=self.stages, microbatches=microbatches)


@dataclass(frozen=True)
class Combination:
    """Two training steps. `later`: the layout in which the second one goes on from a checkpoint of the first."""

    seed: int = 0
    kind: str = "mixed"
    layers: tuple[str, ...] = ("plain", "plain")
    ranks: int = 1
    layout: Layout = field(default_factory=Layout)
    later: Layout | None = None
    rows: int = 8
    length: int = 8
    microbatches: int | None = 2
    second: str = "same"
    between: tuple[str, ...] = ()
    given: str = "step"
    weights: bool = False
    loss: str = "plain"
    extra: tuple[str, ...] = ()
    example: bool = False
    variant: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str, otherwise: Any = None) -> Any:
        value = dict(self.options).get(name, otherwise)
        return FUNCTIONS.get(value, value) if isinstance(value, str) else value

    @property
    def layouts(self) -> list[Layout]:
        return [self.layout, self.later or self.layout]


def combination(seed: int) -> Combination:
    """The combination of a number."""
    random = Random(seed)
    ranks, wild = random.choice((1, 2, 2, 4)), random.random() < 0.12
    kind = random.choice(KINDS)
    depth = 2 if kind in ("mixture", "llama", "gpt2") else 4
    layers = _layers(Random(random.randrange(STACKS)), depth)
    count = random.choice((1, 2, 3, 4, 4, 6, 8))
    layout = _layout(random, kind, ranks, count, len(layers), wild)
    if kind not in OWN:
        layers = (layers * 8)[: max(len(layers), min(layout.stages, 8))]
    drawn = Combination(seed, kind, layers, ranks, layout, microbatches=count)
    drawn = replace(drawn, **_batches(random, drawn), variant=_variant(random, kind, layout))
    if random.random() < 0.15:
        drawn = replace(drawn, later=_layout(random, kind, ranks, count, len(layers), wild))
    names = [name for name in OPTIONS if random.random() < (0.2 if name in RARE else 0.12)]
    stray = wild and random.random() < 0.3
    names = [name for name in names if stray or name not in RARE or RARE[name] in str(layout.mesh)]
    if {"low", "statistics"} & set(layers):  # bfloat16 rounds other values; torch's batch norm computes in one dtype alone
        names = [name for name in names if name != "parallel.param_dtype"]
    return replace(drawn, options=tuple((name, random.choice(OPTIONS[name])) for name in names))


def _layers(random: Random, depth: int) -> tuple[str, ...]:
    """Half of the models have one kind beside plain layers. Few different models: a captured graph serves many combinations."""
    some = random.sample(LAYERS, random.choice((1, 1, 2, 4)))
    return tuple(random.choice((*some, "plain")) for _ in range(random.choice((2, 3, depth))))


def _layout(random: Random, kind: str, ranks: int, microbatches: int, depth: int, wild: bool) -> Layout:
    mesh = _mesh(random, kind, ranks)
    pp = dict(mesh).get("pp", 1) if mesh else ranks
    per = random.choice((1, 1, 2, 2, 3)) if pp < 4 else random.choice((1, 1, 2))
    stages = pp * per if wild or kind not in ("mixture", "long") else max(pp, min(pp * per, 4 if kind == "long" else 2))
    schedule: str | int = random.randrange(1000)
    if random.random() < 0.8:
        names = [name for name in SCHEDULES if name != "ForwardOnly" and (wild or _fits(name, pp, stages, microbatches))]
        schedule = random.choice(names or [schedule])
    starts = [f"layers.{index}" for index in range(1, max(depth, min(stages, 8) if kind == "mixed" else 0))]
    split: Any = random.choice(("count", "count", "names", "names", "auto"))
    if split == "names" and kind not in ("llama", "gpt2") and len(starts) >= stages - 1:
        split = tuple(sorted(random.sample(starts, stages - 1)))
    usual = stages if isinstance(schedule, int) else usual_stages(SCHEDULES[schedule], pp)
    return Layout(mesh, schedule, stages, split if isinstance(split, tuple) or (split == "auto" and usual == stages) else None)


def _fits(name: str, ranks: int, stages: int, microbatches: int) -> bool:
    if (name in ON_A_V and stages != 2 * ranks) or (name in ONE_PER_RANK and ranks > 1 and stages != ranks):
        return False
    try:
        table = SCHEDULES[name](ranks, stages, microbatches)
        check(table, ranks=ranks, stages=stages, microbatches=microbatches)
    except graphpp.GraphPPError:
        return False
    return True


def _mesh(random: Random, kind: str, ranks: int) -> tuple[tuple[str, int], ...]:
    """Sizes of one or two dimensions, and at times dimensions of one rank; none for a world that is one pipeline."""
    if random.random() < 0.25 and kind not in OWN:
        return ()
    names = list(DIMS) + [OWN[kind]] * 2 if kind in OWN else list(DIMS)
    sizes = random.choice(((4,), (2, 2), (2, 2))) if ranks == 4 else (ranks,)
    random.shuffle(names)
    found = dict(zip(dict.fromkeys(names), sizes, strict=False))
    if found.get("tp", 1) > 2:
        found["tp"], found["pp"] = 2, 2
    for name in dict.fromkeys(names):
        if random.random() < 0.2 or name == OWN.get(kind):
            found.setdefault(name, 1)
    mesh = list(found.items())
    random.shuffle(mesh)
    return tuple(mesh)


def _batches(random: Random, drawn: Combination) -> dict[str, Any]:
    even, count = drawn.kind in OWN, drawn.microbatches or 1
    rows = count * random.choice((2, 2, 1, 3)) if even or random.random() < 0.7 else random.randint(count, 3 * count)
    other = ("same", "length") if even else ("length", "rows")
    changes = ("same", "same") if drawn.kind == "long" else ("same", "same", *other)
    extras = ("mask", "scale", "factor", "metrics") if drawn.kind == "mixed" else ()
    between = [each for each in BETWEEN if random.random() < (0.8 if each == "optimizer" else 0.12)]
    return {
        "rows": max(rows, 1 if random.random() < 0.1 else 2),
        "length": 16 if drawn.kind == "long" else 8 if even or random.random() < 0.85 else 3,
        "microbatches": count if random.random() < 0.9 else None,
        "second": random.choice(changes),
        "between": tuple(between),
        "given": "microbatches" if random.random() < 0.25 else "step",
        "weights": random.random() < 0.2,
        "loss": "own" if drawn.kind in ("llama", "gpt2") and random.random() < 0.5 else "plain",
        "extra": tuple(each for each in extras if random.random() < 0.06),
        "example": random.random() < 0.4 and count > 1,
    }


def _variant(random: Random, kind: str, layout: Layout) -> str:
    variants = {"decoder": ("", "tied", "dropout", "sequence"), "long": ("ulysses", "contiguous", "balanced")}
    return random.choice(variants.get(kind, ("",)))


def smaller(large: Combination) -> Iterator[Combination]:
    """One step simpler in one place each, the largest steps first."""
    for ranks, change in ((1, _alone), (2, _halved)):
        if large.ranks > ranks:
            yield replace(large, ranks=ranks, layout=change(large.layout), later=large.later and change(large.later))
    for each in fields(large):
        if each.name not in ("seed", "ranks", "layout") and each.default is not MISSING:
            yield replace(large, **{each.name: each.default})
    for name in ("options", "between", "extra", "layers"):
        values = getattr(large, name)
        for index in range(len(values) if len(values) > 1 else 0):
            yield replace(large, **{name: values[:index] + values[index + 1 :]})
    for index in range(len(large.layers)):
        yield replace(large, layers=(*large.layers[:index], "plain", *large.layers[index + 1 :]))
    for layout in _simpler(large.layout):
        yield replace(large, layout=layout)


def _simpler(layout: Layout) -> Iterator[Layout]:
    yield replace(layout, schedule="auto")
    yield replace(layout, split=None)
    yield replace(layout, mesh=tuple(each for each in layout.mesh if each[1] > 1))
    if layout.stages > 1:
        yield replace(layout, stages=layout.stages // 2, split=None)


def _alone(layout: Layout) -> Layout:
    return replace(layout, mesh=tuple((name, 1) for name, _ in layout.mesh))


def _halved(layout: Layout) -> Layout:
    """On half of the ranks: the first dimension of more than one rank has half of them."""
    at = next((index for index, (_, size) in enumerate(layout.mesh) if size > 1), None)
    sizes = tuple((name, size // 2 if index == at else size) for index, (name, size) in enumerate(layout.mesh))
    return replace(layout, mesh=sizes)


def consistent(drawn: Combination) -> bool:
    """Whether the meshes have the ranks."""
    return all(not layout.mesh or prod(size for _, size in layout.mesh) == drawn.ranks for layout in drawn.layouts)
