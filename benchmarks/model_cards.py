"""The models that `make models` trains with graphpp, as data. Imports no torch.

    CARDS = read_cards()  # benchmarks/tried/*.json: a card for each model and cut
    CARDS[0].result.eager  # the largest relative error of a gradient against a plain loop; 0.0: bit-equal

The files and the fields that cards share with published runs are those of `run_files.py`. `tests/zoo/__main__.py` writes the
files, `model_pages.py` the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from run_files import AnyRun, Layout, read_folder, require

FOLDER = Path(__file__).parent / "tried"
SCHEDULES = {1: "1F1B", 2: "Interleaved1F1B"}  # by stages of a rank


@dataclass(frozen=True)
class Tried:
    """A model with random weights. `tied`: names of parameters that are also other names' parameters; `why`: the reason why the
    uncut graph is not bit-equal to eager, empty if it is."""

    class_name: str
    package: str
    version: str
    parameters: int
    tied: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Machine:
    """`threads`: of a rank's computations."""

    device: str
    ranks: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Cut(Layout):
    """`split`: the number of stages, or the modules at which stages 1.. start; `steps`: those compared, without optimizer."""

    split: int | tuple[str, ...]
    steps: int
    backend: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.schedule == SCHEDULES.get(self.stages[0]), f"schedule: {self.schedule} with stages {self.stages}")
        count = self.split if isinstance(self.split, int) else len(self.split) + 1
        require(len(self.stages) == 1 and count == self.count, f"split: {self.split} for {self.count} stages")

    @property
    def count(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.stages[0]


@dataclass(frozen=True)
class Outcome:
    """The largest relative errors (2-norm) of a loss or a gradient, 0.0 for equal bits, against the uncut graph in one process
    and against a plain loop. `added`: parameters to whose gradients several stages add. `forward`, `backward`: bytes of a
    microbatch over each boundary."""

    uncut: float
    eager: float
    tolerance: float
    added: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("uncut", "eager"):
            require(0 <= getattr(self, name) <= self.tolerance, f"{name}: {getattr(self, name)}, tolerance {self.tolerance}")
        require(self.added or self.uncut == 0, f"uncut: {self.uncut} where no two stages add to one gradient")


@dataclass(frozen=True, kw_only=True)
class Card(AnyRun):
    """One cut of one model."""

    architecture: Tried
    machines: Machine
    settings: Cut
    result: Outcome

    def __post_init__(self) -> None:
        require(self.torch and self.command and self.source.seen == "run", "take torch, command and seen: run")
        require(self.machines.ranks == self.settings.dp * self.settings.pp, f"machines.ranks: {self.machines.ranks}")
        for name in ("forward", "backward"):
            sent = getattr(self.result, name)
            require(len(sent) == self.settings.count - 1 and min(sent) > 0, f"result.{name}: {sent}")
        explained = bool(self.architecture.why) or self.result.added > 0
        require(explained or self.result.eager == 0, f"{self.model}: models.json: why, for an error of {self.result.eager}")


def read_cards(folder: Path = FOLDER) -> tuple[Card, ...]:
    """All cards of a folder. Raises `GraphPPError` for a file that is not valid, a name given twice, a reason without need."""
    cards = read_folder(folder, Card, Tried)
    exact = {card.model for card in cards} - {card.model for card in cards if card.result.eager}
    for card in cards:
        require(not (card.architecture.why and card.model in exact), f"{card.model}: models.json: why, for equal bits")
    return cards
