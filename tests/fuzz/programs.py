"""Random programs: a list of operations over earlier values, the model it stands for, and how Hypothesis draws one.

Contract: a `Program` is plain data. Every list of `Op`s is a valid program (numbers count modulo what there is, and a
value of a kind that is missing is made on the spot), so whatever Hypothesis leaves out when it shrinks, a program
remains. `repr(program)` is Python that makes it again, `program.listing()` shows it as code. `Net(program)` always has
the same parameters, `Net.batch(n)` the same rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from graphpp.batch.microbatch import Microbatch
from tests.fuzz.operations import MAKERS, OPERATIONS, WITH_PARAMETERS, WITH_STATE, D, T

ROWS = 2  # of a microbatch
INPUTS = {"h": "x", "i": "tokens", "m": "mask", "s": "factor"}  # the inputs of a program, by kind


@dataclass(frozen=True)
class Op:
    """One operation. `sources` count back from the newest value of each kind.

    share: "" has a module of its own; "module" calls an earlier one of the same name again (the `which`-th back);
    "weight" has the parameter `weight` of an earlier one that has a square one. frozen: its parameters do not train.
    """

    name: str
    sources: tuple[int, ...] = ()
    share: str = ""
    which: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class Program:
    """Operations in order; `losses` counts back from the newest h and s: the terms of the loss beside the last value.

    inside: the model returns its own loss; else the loss is a function that also reads a target.
    """

    ops: tuple[Op, ...]
    losses: tuple[int, ...] = ()
    inside: bool = True
    unused: bool = False

    def __repr__(self) -> str:
        ops = ",\n        ".join(map(_spell, self.ops))
        return f"Program(\n    (\n        {ops},\n    ),\n    {self.losses}, {self.inside}, {self.unused},\n)"

    def listing(self) -> str:
        """The program as code: which value reads which."""
        made: dict[str, list[str]] = defaultdict(list, {kind: [name] for kind, name in INPUTS.items()})
        fresh, lines, net = itertools.count(), [], Net(self)
        for op, module in zip(self.ops, net.called, strict=True):
            read = [_pick(made[kind], back, f"<new {kind}>") for kind, back in _wanted(op)]
            names = [f"{kind}{next(fresh)}" for kind in OPERATIONS[op.name].results]
            for kind, name in zip(OPERATIONS[op.name].results, names, strict=True):
                made[kind].append(name)
            lines.append(f"{', '.join(names)} = ops[{module}]({', '.join(read)})  # {_spell(op)}")
        return "\n".join([*lines, f"losses: {self.losses}, inside={self.inside}"])


def _spell(op: Op) -> str:
    extra = f", {op.share!r}, {op.which}" if op.share or op.frozen else ""
    return f"Op({op.name!r}, {op.sources}{extra}{', frozen=True' if op.frozen else ''})"


def _wanted(op: Op) -> Iterator[tuple[str, int]]:
    """(kind, how far back) of everything an operation reads."""
    return zip(OPERATIONS[op.name].sources, itertools.chain(op.sources, itertools.repeat(0)), strict=False)


def _pick(pool: Sequence[Any], back: int, missing: Any) -> Any:
    return pool[-1 - back % len(pool)] if pool else missing


def _value(pools: dict[str, list[Tensor]], kind: str, back: int) -> Tensor:
    """A value of a kind; made from the newest h if there is none."""
    return pools[kind][-1 - back % len(pools[kind])] if pools[kind] else MAKERS[kind](pools["h"][-1])


class Net(nn.Module):
    """The model of a program: `ops.k` are its modules, `called[n]` says which one operation n calls."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.program, self.called = program, list[int]()
            self.ops = nn.ModuleList()
            for index, op in enumerate(program.ops):
                self.called.append(self._module(op, program.ops[:index]))
            self.head = nn.Linear(D, D)
            if program.unused:
                self.unused = nn.Linear(D, D)

    def _module(self, op: Op, before: Sequence[Op]) -> int:
        """The number of the module that an operation calls; new ones are made."""
        same = [self.called[index] for index, other in enumerate(before) if other.name == op.name]
        if op.share == "module" and same:
            return int(_pick(same, op.which, None))
        made = OPERATIONS[op.name].make()
        square = [module for module in self.ops if _square(module)]
        if op.share == "weight" and square and _square(made):
            made.weight = _pick(square, op.which, None).weight
        if op.frozen:
            made.requires_grad_(False)
        self.ops.append(made)
        return len(self.ops) - 1

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, factor: Tensor) -> dict[str, Any]:
        """The program's values: `loss` (if inside) or `terms`, and some of the last values."""
        pools: dict[str, list[Tensor]] = defaultdict(list, {"h": [x], "i": [tokens], "m": [mask], "s": [factor]})
        for op, module in zip(self.program.ops, self.called, strict=True):
            made = self.ops[module](*(_value(pools, kind, back) for kind, back in _wanted(op)))
            values = made if isinstance(made, tuple) else (made,)
            for kind, value in zip(OPERATIONS[op.name].results, values, strict=True):
                pools[kind].append(value)
        candidates = [value for kind in "hs" for value in pools[kind]]
        terms = [_term(self.head(pools["h"][-1])), *(_term(_pick(candidates, back, x)) for back in self.program.losses)]
        result: dict[str, Any] = {"last": pools["h"][-1], "integers": pools["i"][-1], "number": pools["s"][-1]}
        return {**result, "loss": sum(terms)} if self.program.inside else {**result, "terms": terms}

    def batch(self, count: int) -> list[Microbatch]:
        """`count` microbatches."""
        generator = torch.Generator().manual_seed(1)
        return [_microbatch(generator, with_target=not self.program.inside) for _ in range(count)]

    def loss(self) -> Any:
        """What `graphpp.compile` takes as `loss`."""
        return None if self.program.inside else outside_loss


def _square(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.shape == (D, D)


def _term(value: Tensor) -> Tensor:
    return value.square().mean()


def _microbatch(generator: torch.Generator, with_target: bool) -> Microbatch:
    x = torch.randn(ROWS, T, D, generator=generator)
    tokens = torch.randint(D, (ROWS, T), generator=generator)
    mask = torch.rand(ROWS, T, 1, generator=generator) > 0.3
    factor = torch.rand((), generator=generator) + 0.5
    target = torch.randint(D, (ROWS, T), generator=generator) if with_target else None
    return Microbatch((x, tokens), {"mask": mask, "factor": factor}, target)


def outside_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    """A loss that reads several values and a target."""
    return sum(output["terms"]) + F.cross_entropy(output["last"].flatten(0, 1), target.flatten())


# --------------------------------------------------------------------------------------------------------- strategies

_BACK = st.integers(0, 5)


@st.composite
def operations(draw: st.DrawFn) -> Op:
    """One operation; modules with parameters come twice as often."""
    name = draw(st.sampled_from([*OPERATIONS, *WITH_PARAMETERS]))
    sources = tuple(draw(_BACK) for _ in OPERATIONS[name].sources)
    if name not in WITH_STATE:
        return Op(name, sources)
    share = draw(st.sampled_from(["", "", "module", "weight", "weight"]))
    which = draw(_BACK) if share else 0
    return Op(name, sources, share, which, draw(st.sampled_from([False, False, False, True])))


def programs(places: int = 10) -> st.SearchStrategy[Program]:
    """Programs of up to `places` operations; mostly of nearly so many, for lists would mostly be short."""
    place = st.integers(0, 7).flatmap(lambda filled: operations() if filled else st.none())
    ops = st.tuples(*[place] * places).map(lambda drawn: tuple(op for op in drawn if op is not None))
    losses = st.lists(st.integers(0, 9), max_size=2).map(tuple)
    return st.builds(Program, ops, losses, st.booleans(), st.booleans())
