"""Files of runs, published or our own: the fields that all share, and the one reader that checks them. Imports no torch.

    read_folder(Path("benchmarks/published"), Run, Model)  # published_runs.py: other systems, on their machines
    read_folder(Path("benchmarks/tried"), Card, Tried)  # model_cards.py: the models that `make models` trains with graphpp

A folder has `models.json`, the models by name, and any number of groups of runs, each with one source: `{"source": ..,
"common": .., "runs": [..]}`. The objects in `common` are completed by those of each run. An unknown field, a missing one and
one of another type raise `GraphPPError` that names file, entry and field; so do the checks of each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from graphpp.errors import GraphPPError
from graphpp.from_json import document, read

SEEN = ("page", "transcription", "issue", "earlier", "memory", "run")
R = TypeVar("R", bound="AnyRun")


def require(fine: object, problem: str) -> None:
    if not fine:
        raise GraphPPError(problem)


@dataclass(frozen=True)
class Source:
    """`where`: a URL, an arXiv number or a folder of this repository. `seen`: how the figures came here: from the page itself;
    a transcription of its table on other pages; the list of the project's issue "The oracle"; an earlier version of
    benchmarks/published.py; from memory; or a run of our own."""

    title: str
    where: str
    date: str
    seen: str

    def __post_init__(self) -> None:
        require(self.seen in SEEN, f"seen: take {', '.join(SEEN)}, got {self.seen!r}")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a batch and the stages are. `dp`: ranks with rows of their own; `pp`: ranks of a pipeline; `stages`: of a rank;
    `rows`: of a microbatch; `batch`: rows of a step; `schedule`: "loop" without a pipeline."""

    dp: int
    rows: int
    batch: int
    schedule: str
    pp: int = 1
    stages: tuple[int, ...] = (1,)
    precision: str = "bfloat16"

    def __post_init__(self) -> None:
        numbers = self.dp, self.rows, self.batch, self.pp, *self.stages
        require(self.stages and min(numbers) > 0, "dp, rows, batch, pp, stages: numbers from 1")
        require(self.batch % (self.dp * self.rows) == 0, f"batch: {self.batch} rows for dp {self.dp} x {self.rows} rows")

    @property
    def microbatches(self) -> int:
        return self.batch // (self.dp * self.rows)


@dataclass(frozen=True, kw_only=True)
class AnyRun:
    """A run. `group`: the name of its file; `model`: a name in `models.json`; `torch`: the version of PyTorch; `command`: the
    line that repeats the run; None: not said. The kind of run declares `machines`, `settings`, `result`, and the model as
    `architecture`."""

    name: str
    group: str
    source: Source
    model: str
    torch: str | None = None
    command: str | None = None


def read_folder(folder: Path, run: type[R], model: type[Any]) -> tuple[R, ...]:
    """The runs of all files of a folder. Raises `GraphPPError` for a file that is not valid, and for a name given twice."""
    known = document(folder / "models.json", "models.json")
    models = {name: read(model, each, f"models.json: {name}") for name, each in known.items()}
    files = sorted(file for file in folder.glob("*.json") if file.stem != "models")
    found: list[R] = [each for file in files for each in _group(file, run, models)]
    names = [each.name for each in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"{folder}: names given twice: {twice}")
    return tuple(found)


def _group(file: Path, run: type[R], models: Mapping[str, Any]) -> list[R]:
    given = document(file, file.name)
    require(set(given) == {"source", "common", "runs"}, f"{file.name}: take source, common and runs, got {sorted(given)}")
    runs = [{"source": given["source"], **_merged(given["common"], each)} for each in given["runs"]]
    return [_run(f"{file.name}: runs[{at}] {each.get('name')!r}", run, each, models) for at, each in enumerate(runs)]


def _run(path: str, run: type[R], given: dict[str, Any], models: Mapping[str, Any]) -> R:
    require(given.get("model") in models, f"{path}: model: take a name of models.json, got {given.get('model')!r}")
    own = {"group": path.partition(".")[0], "architecture": models[given["model"]]}
    made: R = read(run, {**given, **own}, path)
    return made


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with the values of `own` for the same names; objects are joined, and lists put one after the other."""
    both: dict[str, Any] = dict(common)
    for name, value in own.items():
        known = both.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            both[name] = known | value
        elif name == "assumed" and known is not None:
            both[name] = [*known, *value]
        else:
            both[name] = value
    return both
