"""Days, dollars and failures of a whole training by a plan, and the table of `graphpp plan` for several machines and batches.

Contract: a model is captured once for each length and type of device. Each line of the table is the best plan of a search of
its own, or says that no plan fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from graphpp.cli.command import Answer
from graphpp.devices import Machines, MixedMachines
from graphpp.errors import GraphPPError, NoPlanError
from graphpp.report.text_table import text_table
from graphpp.units import spell_bytes, spell_time

if TYPE_CHECKING:  # these load torch, which help pages do not need
    from graphpp.cluster_planner.costs.model_costs import ModelCosts
    from graphpp.cluster_planner.plans.training_plan import TrainingPlan

_DAY = 86_400  # seconds


class Question(NamedTuple):
    """One search: tokens of a row (None: the model's own), machines, and rows of a step."""

    length: int | None
    machines: Machines | MixedMachines
    batch: int


@dataclass(frozen=True)
class Training:
    """`tokens`: of the whole training; `price`: dollars of a GPU hour, or a number for each group of machines; `mtbf`: hours
    between failures of a GPU; `checkpoint`, `restart`: seconds of a save and of a restart. None: not asked. Raises
    `GraphPPError` for one without those that it needs."""

    tokens: float | None = None
    price: tuple[float, ...] | None = None
    mtbf: float | None = None
    checkpoint: float | None = None
    restart: float | None = None

    def __post_init__(self) -> None:
        if self.price is not None and self.tokens is None:
            raise GraphPPError("--price: say for how many tokens: --tokens 1e12")
        if len({each is None for each in (self.mtbf, self.checkpoint, self.restart)}) > 1:
            raise GraphPPError("--mtbf, --checkpoint, --restart: give all three, hours and twice seconds, or none")

    def numbers(self, plan: TrainingPlan, machines: Machines | MixedMachines) -> dict[str, float]:
        """The numbers that were asked for, by name: the share of the time that makes progress, `days`, and `dollars` of
        all machines, idle groups too. Raises `GraphPPError` for other prices than one, or one for each group."""
        found, share = dict[str, float](), 1.0
        if self.mtbf is not None and self.checkpoint is not None and self.restart is not None:
            failing = plan.goodput(mtbf_hours=self.mtbf, save_seconds=self.checkpoint, restart_seconds=self.restart)
            share = failing.share
            found |= {"goodput": share, "steps_between_saves": failing.steps}
            found["hours_between_failures"] = failing.failure_seconds / 3600
        if self.tokens is not None:
            if not plan.tokens:
                raise GraphPPError("--tokens: the rows of this model have no tokens: leave it out")
            found["days"] = self.tokens / (plan.tokens_per_second * share) / _DAY if share else float("inf")
            if self.price is not None:
                found["dollars"] = found["days"] * 24 * self.hourly(machines)
        return found

    def hourly(self, machines: Machines | MixedMachines) -> float:
        """Dollars of an hour of all machines; 0 without prices."""
        groups, prices = machines.groups, self.price or (0.0,)
        if len(prices) not in (1, len(groups)):
            raise GraphPPError(f"--price: take one number, or one for each of {len(groups)} groups of {machines}")
        every = prices * (len(groups) if len(prices) == 1 else 1)
        return sum(each.gpus * dollars for each, dollars in zip(groups, every, strict=True))


_FORMS = {
    "goodput": "{:.1%}", "steps_between_saves": "{:,.0f}", "hours_between_failures": "{:,.1f}", "days": "{:,.1f}",
    "dollars": "{:,.0f}",
}  # fmt: skip


def spelled(numbers: Mapping[str, float]) -> str:
    """The numbers of a training in a line."""
    return ", ".join(f"{name.replace('_', ' ')} {_FORMS[name].format(number)}" for name, number in numbers.items())


def plan_table(
    model: str, questions: Sequence[Question], captured: Mapping[str, Any], searched: Mapping[str, Any], training: Training
) -> Answer:
    """The best plan for each question. `captured`, `searched`: keywords of `capture_costs` and of `graphpp.plan`."""
    answers = list(_answers(model, questions, captured, searched))
    numbers = [{} if isinstance(found, str) else training.numbers(found, question.machines) for question, found in answers]
    further = list(dict.fromkeys(name for each in numbers for name in each))
    own = [name.replace("_", " ") for name in further]
    heads = ("machines", "batch", "length", "plan", "step", "tokens/s", "MFU", "memory", *own)
    rows = [
        (*_row(question, found), *(_FORMS[name].format(each[name]) if name in each else "-" for name in further))
        for (question, found), each in zip(answers, numbers, strict=True)
    ]
    documents = [_document(*answer, each) for answer, each in zip(answers, numbers, strict=True)]
    table = text_table(heads, rows, left=("machines", "plan"), wraps=("plan", *own), width=180)
    return Answer(table, {"rows": documents}, yes=any(each["plan"] for each in documents))


def _answers(
    model: str, questions: Sequence[Question], captured: Mapping[str, Any], searched: Mapping[str, Any]
) -> Iterator[tuple[Question, TrainingPlan | str]]:
    """Each question with its best plan, or with the words that say why there is none."""
    from graphpp.cli.models import load_model  # these load torch, which help pages do not need
    from graphpp.cluster_planner.costs.capture_costs import capture_costs
    from graphpp.cluster_planner.plans.plan import plan

    known: dict[tuple[int | None, str], ModelCosts] = {}
    for question in questions:
        length, machines, batch = question
        key = length, machines.device.torch_type
        if key not in known:
            loaded = load_model(model, length=length, meta=True, length_needed=True)
            known[key] = capture_costs(loaded.model, loaded.loss, loaded.example, device_type=key[1], **captured)
        try:
            yield question, plan(known[key], machines=machines, batch=batch, **searched).best
        except NoPlanError as error:
            yield question, str(error)


def _row(question: Question, found: TrainingPlan | str) -> tuple[str, ...]:
    asked = str(question.machines), str(question.batch)
    if isinstance(found, str):
        return *asked, str(question.length or "-"), "no plan fits the memory", "-", "-", "-", "-"
    numbers = spell_time(found.step_seconds, "s"), f"{found.tokens_per_second:,.0f}", found.utilization, spell_bytes(found.peak)
    return *asked, str(found.tokens or "-"), str(found.setting), *numbers


def _document(question: Question, found: TrainingPlan | str, numbers: Mapping[str, float]) -> dict[str, Any]:
    asked = {"machines": str(question.machines), "batch": question.batch, "length": question.length}
    if isinstance(found, str):
        return {**asked, "plan": None, "message": found}
    return {**asked, "tokens_per_second": found.tokens_per_second, **numbers, "plan": json.loads(found.to_json())}
