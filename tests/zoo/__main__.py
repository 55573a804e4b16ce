"""`python -m tests.zoo`: run every model of the zoo and write benchmarks/tried; the fields: benchmarks/model_cards.py."""

import json
import os
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.distributed import close_workers
from tests.zoo.models import ROWS, ZOO, Entry
from tests.zoo.running import MICROBATCHES, RANKS, STEPS, TOLERANCE, Run, Visit, different, error, run_model

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tried"


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.set_num_threads(1)
    try:
        runs = [card(entry, run, visit) for name, entry in ZOO.items() for visit in [run_model(name)] for run in visit.cut]
    finally:
        close_workers()
    FOLDER.mkdir(exist_ok=True)
    models = [f"{json.dumps(entry.title)}: {json.dumps(described(entry))}" for entry in ZOO.values()]
    (FOLDER / "models.json").write_text(f"{{\n{lines(models)}\n}}\n")
    source = {"title": "the zoo", "where": "tests/zoo", "date": f"{datetime.now(UTC):%Y-%m-%d}", "seen": "run"}
    head = f'"source": {json.dumps(source)},\n"common": {json.dumps(common())}'
    (FOLDER / "zoo.json").write_text(f'{{\n{head},\n"runs": [\n{lines(map(json.dumps, runs))}\n]\n}}\n')


def lines(texts: Iterable[str]) -> str:
    return ",\n".join(f"  {text}" for text in texts)


def common() -> dict[str, Any]:
    layout = {"dp": 1, "pp": RANKS, "rows": ROWS // MICROBATCHES, "batch": ROWS, "steps": STEPS}
    return {
        "torch": version("torch"),
        "command": "make models",
        "machines": {"device": "x86-64 CPU", "ranks": RANKS, "threads": torch.get_num_threads()},
        "settings": {**layout, "precision": "float32", "backend": "gloo"},
        "result": {"tolerance": TOLERANCE},
    }


def described(entry: Entry) -> dict[str, Any]:
    model = entry.model()
    first = {fqn for fqn, _ in model.named_parameters()}
    return {
        "class_name": type(model).__name__,
        "package": entry.library,
        "version": version(entry.library),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tied": [fqn for fqn, _ in model.named_parameters(remove_duplicate=False) if fqn not in first],
        "why": entry.inexact,
    }


def card(entry: Entry, run: Run, visit: Visit) -> dict[str, Any]:
    forward, backward = zip(*run.crossing, strict=True)
    split = int(run.name.removeprefix("split=")) if run.name.startswith("split=") else run.name.split(", ")
    others = {"uncut": visit.uncut, "eager": visit.eager}
    against = {name: error(run, other) if different(run, other) else 0.0 for name, other in others.items()}
    return {
        "name": f"{entry.title}, {run.name}",
        "model": entry.title,
        "settings": {"split": split, "stages": [run.stages // RANKS], "schedule": run.schedule},
        "result": {**against, "added": len(run.shared), "forward": forward, "backward": backward},
    }


if __name__ == "__main__":
    main()
