"""A step of one process as a function of tensors, so that it can be recorded as one CUDA graph.

- The arguments: parameters and buffers, which keep their addresses; each tensor of each microbatch that a stage reads; the
  seeds; the sums of gradients with which the step begins.
- The results: the losses, output leaves and metrics of each microbatch; the sums of gradients. `places` names them. Buffers are
  written in place.
- Two steps with the same `key` have as many arguments and results. No microbatch of such a step is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch

from graphpp.runtime.stage import GraphStage
from graphpp.runtime.task import StepInputs, TaskGraphs

Place = tuple[str, int, Any, Any]  # a field of a stage's buffers or "sums"; the stage; microbatch; output leaf, metric, or FQN


class StepGraphs(TaskGraphs, Protocol):
    """Records the steps of a runner and replays them (`backends/record_programs.py`)."""

    def run_step(self, run: Callable[[], None], whole: Callable[[], WholeStep] | None) -> None:
        """Run a step by `run`, or as one function, if `whole` makes it one."""


class WholeStep:
    def __init__(
        self,
        stages: Mapping[int, GraphStage],
        inputs: StepInputs,
        begin: Callable[[], None],
        loop: Callable[[], None],
    ) -> None:
        """A step that the stages have begun; `begin` begins it anew, `loop` runs it."""
        self._stages, self._inputs, self.begin, self._loop = stages, inputs, begin, loop
        self._paths = [
            (number, path)
            for number in range(len(inputs.tensors))
            for path in sorted({path for stage in stages.values() for path in stage.paths(number)})
        ]
        self._sums = [(index, fqn) for index, stage in stages.items() for fqn in stage.gradients.sums]
        state = [self._value(stage, fqn) for stage in stages.values() for fqn in sorted(stage.reads)]
        take = next(iter(stages.values())).buffers.copies.take
        tensors = [take(inputs.tensors[number][path]) for number, path in self._paths]
        sums = [stages[index].gradients.sums[fqn] for index, fqn in self._sums]
        self.arguments = [*state, *tensors, *inputs.seeds, *sums]
        self.in_place = range(len(state))
        self.key = tuple(self._sums)
        self.places: list[Place] = []

    @staticmethod
    def _value(stage: GraphStage, fqn: str) -> torch.Tensor:
        assert stage.buffers.parameter_or_buffer is not None, "begin() comes first"
        return stage.buffers.parameter_or_buffer(fqn)

    def run(self, arguments: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the step; takes the arguments out of their list."""
        values = iter(arguments[len(self.in_place) :])
        arguments.clear()
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in self._inputs.tensors]
        for number, path in self._paths:
            tensors[number][path] = next(values)
        inputs = StepInputs(tensors, list(islice(values, len(self._inputs.seeds))))
        sums = dict(zip(self._sums, values, strict=True))
        for index, stage in self._stages.items():
            stage.buffers.inputs = inputs
            stage.gradients.restart({fqn: total for (at, fqn), total in sums.items() if at == index})
        sums.clear()
        self._loop()
        return self._taken()

    def _taken(self) -> list[torch.Tensor | None]:
        """Take the results out of the stages."""
        found: dict[Place, torch.Tensor] = {}
        for index, stage in self._stages.items():
            buffers = stage.buffers
            found |= {("losses", index, number, None): loss for number, loss in buffers.losses.items()}
            several: Mapping[str, Mapping[int, Mapping[Any, torch.Tensor]]]
            several = {"outputs": buffers.outputs, "metrics": buffers.metrics}
            for name, by_microbatch in several.items():
                for number, values in by_microbatch.items():
                    found |= {(name, index, number, which): value for which, value in values.items()}
            found |= {("sums", index, None, fqn): total for fqn, total in stage.gradients.take().items()}
            buffers.clear()
            buffers.inputs = None
        self.places = list(found)
        return list(found.values())

    def finish(self, places: Sequence[Place], results: Sequence[Any], own: Callable[[list[Any]], list[Any]]) -> None:
        """Store the results of a step for its end; `own` copies values that live longer than the step."""
        sums = {("sums", index, None, fqn) for index, fqn in self._sums}  # their values are copied into `param.grad`
        kept = dict(zip(places, results, strict=True))
        others = [place for place in places if place not in sums]
        kept.update(zip(others, own([kept[place] for place in others]), strict=True))
        for stage in self._stages.values():
            stage.gradients.restart({})
        for (name, index, number, which), value in kept.items():
            stage = self._stages[index]
            if name == "sums":
                stage.gradients.sums[which] = value
            elif name == "losses":
                stage.buffers.losses[number] = value
            else:
                getattr(stage.buffers, name).setdefault(number, {})[which] = value
