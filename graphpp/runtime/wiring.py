"""Resolves a program's roles to positions once, so that running it looks up nothing by role.

Contract: a `Wiring` has a list for each kind of role, with the positions of its arguments or results. `fixed` (parameters and
buffers), `constants`, `sizes` and `step_invariants` are filled in once per step (`bound`), all others once per microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from graphpp.runtime import program
from graphpp.runtime.program import InputRole, Program, TensorMeta


@dataclass
class Wiring:
    """Where a program's arguments come from, and where its results go: (position, FQN, path, name or leaf) by kind."""

    program: Program
    fixed: list[tuple[int, str]] = field(default_factory=list)
    constants: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    sizes: list[tuple[int, float]] = field(default_factory=list)
    inputs: list[tuple[int, str]] = field(default_factory=list)
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
    bound: list[Any] = field(default_factory=list)  # the arguments, filled in as far as they are the same for a whole step

    @cached_property
    def computation(self) -> tuple[Any, ...]:
        """Equal for two programs, whose inputs are parameters, buffers and constants, if they compute the same values."""
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
) -> Wiring:
    """Resolve the roles of `item`; `arriving`: the values that cross the boundary into the stage, in order.

    `sizes`: the numbers for `Size` inputs, by formula.
    """
    wiring = Wiring(item)
    positions = {meta.name: position for position, meta in enumerate(arriving)}
    for index, role in enumerate(item.inputs):
        match role:
            case program.Parameter(fqn) | program.Buffer(fqn):
                wiring.fixed.append((index, fqn))
            case program.Constant(name):
                wiring.constants.append((index, constants[name]))
            case program.Size(formula):
                wiring.sizes.append((index, sizes[formula]))
            case program.StepInvariant(name):
                wiring.step_invariants.append((index, name))
            case _:
                _wire_input_of_microbatch(index, role, wiring, positions)
    _wire_results(item, wiring)
    return wiring


def _wire_input_of_microbatch(index: int, role: InputRole, wiring: Wiring, positions: Mapping[str, int]) -> None:
    match role:
        case program.Input(path):
            wiring.inputs.append((index, path))
        case program.Seed():
            wiring.seeds.append(index)
        case program.RandomKey():
            wiring.keys.append(index)
        case program.Received(name):
            wiring.received.append((index, positions[name]))
        case program.Saved(name):
            wiring.saved.append((index, name))


def _wire_results(item: Program, wiring: Wiring) -> None:
    for index, role in enumerate(item.outputs):
        match role:
            case program.Saved(name):
                wiring.keeps.append((index, name))
            case program.Sent():
                wiring.sends.append(index)
            case program.Gradient(fqn):
                wiring.gradients[index] = fqn
            case program.BufferUpdate(fqn):
                wiring.updates.append((index, fqn))
            case program.Loss():
                wiring.losses.append(index)
            case program.Output(leaf):
                wiring.outputs.append((index, leaf))
            case program.Metric(name):
                wiring.metrics.append((index, name))
