"""Resolves a program's roles to positions once, so that a run looks up nothing by role.

A `Wiring` has a list for each kind of role, with the positions of its arguments or results. `fixed` (parameters and buffers),
`constants`, `sizes` and `step_invariants` are filled in once per step (`bound`), all others once per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from graphpp.runtime import program as roles
from graphpp.runtime.program import Program, TensorMeta


@dataclass
class Wiring:
    """Where a program's arguments come from, and where its results go: (position, FQN, path, name or leaf) by kind."""

    program: Program
    fixed: list[tuple[int, str]] = field(default_factory=list)
    constants: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    sizes: list[tuple[int, float]] = field(default_factory=list)
    inputs: list[tuple[int, str]] = field(default_factory=list)
    numbers: list[tuple[int, str]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, str]] = field(default_factory=list)
    step_invariants: list[tuple[int, str]] = field(default_factory=list)
    keeps: list[tuple[int, str]] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)
    gradients: dict[int, str] = field(default_factory=dict)  # position among the results -> FQN
    updates: list[tuple[int, str]] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)
    metrics: list[tuple[int, str]] = field(default_factory=list)
    bound: list[Any] = field(default_factory=list)  # the arguments that are the same for a whole step

    @cached_property
    def computation(self) -> tuple[Any, ...]:
        """Equal for two programs of parameters, buffers and constants that compute the same values."""
        constants = tuple(id(constant) for _, constant in self.constants)
        return self.program.source, self.program.inputs, constants, tuple(self.sizes)

    @property
    def shared_gradients(self) -> set[str]:
        """FQNs of the gradients whose memory an input or another result may share."""
        return {fqn for index, fqn in self.gradients.items() if index in self.program.shared}


def wire(
    item: Program,
    arriving: Sequence[TensorMeta],
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, float],
    name: Callable[[str], str] = str,
) -> Wiring:
    """Resolve the roles of `item`. `arriving`: the values that enter the stage, in order; `sizes`: numbers by formula; `name`:
    the name on this rank of a parameter, or of rows of one."""
    place = {meta.name: position for position, meta in enumerate(arriving)}
    return Wiring(
        item,
        fixed=[(at, name(role.fqn)) for at, role in _of(item.inputs, roles.Parameter, roles.Buffer)],
        constants=[(at, constants[role.name]) for at, role in _of(item.inputs, roles.Constant)],
        sizes=[(at, sizes[role.formula]) for at, role in _of(item.inputs, roles.Size)],
        inputs=[(at, role.path) for at, role in _of(item.inputs, roles.Input) if not isinstance(role, roles.Number)],
        numbers=[(at, role.path) for at, role in _of(item.inputs, roles.Number)],
        seeds=[at for at, _ in _of(item.inputs, roles.Seed)],
        keys=[at for at, _ in _of(item.inputs, roles.RandomKey)],
        received=[(at, place[role.name]) for at, role in _of(item.inputs, roles.Received)],
        saved=[(at, role.name) for at, role in _of(item.inputs, roles.Saved)],
        step_invariants=[(at, role.name) for at, role in _of(item.inputs, roles.StepInvariant)],
        keeps=[(at, role.name) for at, role in _of(item.outputs, roles.Saved)],
        sends=[at for at, _ in _of(item.outputs, roles.Sent)],
        gradients={at: name(role.fqn) for at, role in _of(item.outputs, roles.Gradient)},
        updates=[(at, role.fqn) for at, role in _of(item.outputs, roles.BufferUpdate)],
        losses=[at for at, _ in _of(item.outputs, roles.Loss)],
        outputs=[(at, role.index) for at, role in _of(item.outputs, roles.Output)],
        metrics=[(at, role.name) for at, role in _of(item.outputs, roles.Metric)],
    )


def _of(values: Sequence[object], *kinds: type) -> list[tuple[int, Any]]:
    return [(at, role) for at, role in enumerate(values) if isinstance(role, kinds)]
