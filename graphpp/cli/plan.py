"""`graphpp plan MODEL --machines 512xH100 --batch 2048`: the fastest ways to train a model, found on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphpp.cli import forms
from graphpp.cli.command import Answer, add_command
from graphpp.cli.verify import MODEL_HELP
from graphpp.devices import KNOWN_NAMES, Machines, known_device
from graphpp.errors import GraphPPError

if TYPE_CHECKING:
    import torch

    from graphpp.planner.plans.found_plans import TrainingPlans

_MACHINES_HELP = 'Machines as "<count>x<device>", e.g. 512xH100, or a JSON file with the fields of graphpp.devices.Machines.'
_SIZES_HELP = "Ranks along {}, or several numbers with commas among which the search chooses. All that fit if left out."


def add_to(root: typer.Typer) -> None:
    """Add the command."""
    add_command(root, "plan")(plan)


def plan(  # noqa: PLR0913 - the dimensions of the search
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    machines: Annotated[str, typer.Option(help=_MACHINES_HELP)],
    batch: Annotated[int, typer.Option(min=1, help="Rows of a training step, on all ranks together.")],
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a row of a Hugging Face model.")] = None,
    cap: Annotated[str | None, typer.Option(help="Bytes that a GPU may hold: 72GiB. 90 % of its memory if left out.")] = None,
    dtype: Annotated[str, typer.Option(help='Dtype of the computation, or "own" for that of the model.')] = "bfloat16",
    pp: Annotated[str | None, typer.Option(help=_SIZES_HELP.format("the pipeline"))] = None,
    tp: Annotated[str | None, typer.Option(help=_SIZES_HELP.format("tensor parallelism"))] = None,
    ep: Annotated[str | None, typer.Option(help=_SIZES_HELP.format("expert parallelism"))] = None,
    cp: Annotated[str, typer.Option(help="Ranks that share each sequence: the model has to call graphpp.attention.")] = "1",
    rows: Annotated[str | None, typer.Option(help="Rows of a microbatch, or several numbers with commas.")] = None,
    schedules: Annotated[str | None, typer.Option(help="Names of schedules with commas. All if left out.")] = None,
    offload: Annotated[bool, typer.Option(help="Whether saved values may wait in the host's memory, as few as fit.")] = True,
    save: Annotated[Path | None, typer.Option(help="A file for the best plan, for graphpp.TrainingPlan.from_json.")] = None,
    html: Annotated[Path | None, typer.Option(help="A file for a page of all plans, to look at in a browser.")] = None,
    front: Annotated[bool, typer.Option("--front", help="Print the plans of the front of time and memory.")] = False,
) -> Answer:
    """Find the fastest plan to train a model on machines that need not be there: mesh, stages, schedule, microbatches, memory.

    The model is built on the meta device and takes no memory.
    """
    from graphpp.cli.models import load_model  # load torch, which help pages need not
    from graphpp.planner.plans.plan import plan as search

    given = _dtype(dtype)
    sizes = {name: _sizes(name, text) for name, text in (("pp", pp), ("tp", tp), ("ep", ep), ("cp", cp), ("rows", rows))}
    most = forms.read_bytes("--cap", cap) if cap is not None else None
    known = read_machines(machines)
    loaded = load_model(model, length=length, meta=True, length_needed=True)
    found = search(
        loaded.model, loaded.loss, loaded.example, machines=known, batch=batch, memory_cap=most, param_dtype=given,
        offload=offload, schedules=None if schedules is None else [name.strip() for name in schedules.split(",")],
        **{name: each for name, each in sizes.items() if each is not None},  # type: ignore[arg-type]
    )  # fmt: skip
    files = {"save": (save, found.best.to_json), "html": (html, found.to_html)}
    notes = [written(f"--{name}", file, text()) for name, (file, text) in files.items() if file is not None]
    return Answer(_front(found) if front else str(found), json.loads(found.to_json()), notes=notes)


def _front(found: TrainingPlans) -> str:
    """The plans of the front, each in full, the fastest first."""
    return "\n\n".join(map(str, found.front))


def written(option: str, file: Path, text: str) -> str:
    """Write a file, and say so. Raises `GraphPPError` where it cannot be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphPPError(f"{option}: {error}") from error
    return f"wrote {file}"


def read_machines(text: str) -> Machines:
    """Machines from "<count>x<device>", or from a JSON file of their fields, whose device may be the name of a known one."""
    if not text.endswith(".json"):
        return Machines.read(text)
    from graphpp.planner.plans.from_json import document, read

    given = document(Path(text), "--machines")
    if isinstance(given.get("device"), str):
        name = given["device"]
        given["device"] = known_device(name)
        if given["device"] is None:
            raise GraphPPError(f"--machines.device: {name!r} is no known device: devices are {KNOWN_NAMES}; or give its fields")
    found: Machines = read(Machines, given, "--machines")
    return found


def _sizes(name: str, text: str | None) -> Sequence[int] | None:
    """Numbers between commas. Raises `GraphPPError` for anything else."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise GraphPPError(f"--{name}: take a positive number, or several with commas, got {text!r}")
    return [int(part) for part in parts]


def _dtype(name: str) -> torch.dtype | None:
    """The dtype of a name; None for "own". Raises `GraphPPError` for another name."""
    import torch

    found = None if name == "own" else getattr(torch, name, None)
    if name != "own" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise GraphPPError(f'--dtype: take the name of a floating dtype of torch, e.g. bfloat16, or "own", got {name!r}')
    return found
