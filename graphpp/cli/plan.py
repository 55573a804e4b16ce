"""`graphpp plan MODEL --machines 512xH100 --batch 2048`: the fastest ways to train a model; `compare`, `report`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graphpp import devices
from graphpp.cli import forms
from graphpp.cli.command import Answer, add_command, write_text
from graphpp.cli.plan_table import Question, Training, plan_table, spelled
from graphpp.cli.verify import MODEL_HELP
from graphpp.devices import KNOWN_NAMES, Device, Machines, known_device
from graphpp.errors import GraphPPError, NoPlanError

if TYPE_CHECKING:
    import torch

    from graphpp.cluster_planner.plans.found_plans import TrainingPlans
    from graphpp.cluster_planner.plans.training_plan import TrainingPlan

_MACHINES_HELP = (
    'Machines as "<count>x<device>": 512xH100, or 512xh100.json with a file of graphpp doctor --calibrate; or a JSON file with '
    'the fields of graphpp.devices.Machines. Unlike ones in one job: "8xH100 + 8xA100@40GB".'
)
_CAP_HELP = "Bytes that a GPU may hold: 72GiB; of unlike machines 72GiB,36GiB. 90 % of its memory if left out."
_SHARED_HELP = "Which layers {} ranks share, in place of the model's plan: layers.*.up=colwise,layers.*.down=rowwise."
_FLOAT8_HELP = (
    "The recipe of torchao for linear layers inside of numbered modules: tensorwise, rowwise, rowwise_with_gw_hp. Or recipes "
    "of layers: layers.*.mlp=rowwise,layers.*.self_attn=tensorwise."
)
_RECOMPUTE_HELP = "What the search may recompute, with commas: none, selective, full, fractions. Any of these if left out."
_LIKE_HELP = (
    'A layout to price beside the best: "pp 8, tp 4, MegatronInterleaved 5, keep 1"; Megatron-LM\'s arguments; or a file with '
    "them, of torchtitan (.toml), of DeepSpeed (.json), or of a plan."
)
_SIZES_HELP = "Ranks along {}, or several numbers with commas among which the search chooses. All that fit if left out."


_PRICE_HELP = "Dollars of a GPU hour: print those of the training; of unlike machines with commas: 2.5,1.2."
_MTBF_HELP = "Hours between failures of one GPU: print the share of the time that makes progress, and how often to save."
_FILE_HELP = "The JSON of `graphpp plan --json`, or of its --save."
_FIRST_HELP = f"{_FILE_HELP} FILE:3 is its third plan, FILE:yours that of --like, FILE alone the best one."


def add_to(root: typer.Typer) -> None:
    for function in (plan, compare, report):
        add_command(root, function.__name__)(function)


def plan(  # noqa: PLR0913 - the dimensions of the search
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    machines: Annotated[str, typer.Option(help=_MACHINES_HELP)],
    batch: Annotated[str, typer.Option(help="Rows of a training step, on all ranks together.")],
    length: Annotated[str | None, typer.Option(help="Tokens in a row of a Hugging Face model.")] = None,
    cap: Annotated[str | None, typer.Option(help=_CAP_HELP)] = None,
    dtype: Annotated[str, typer.Option(help='Dtype of the computation, or "own" for that of the model.')] = "bfloat16",
    pp: Annotated[str | None, typer.Option(help=_SIZES_HELP.format("the pipeline"))] = None,
    tp: Annotated[str | None, typer.Option(help=_SIZES_HELP.format("tensor parallelism"))] = None,
    ep: Annotated[str | None, typer.Option(help=_SIZES_HELP.format("expert parallelism"))] = None,
    cp: Annotated[str, typer.Option(help="Ranks that share each sequence: the model has to call graphpp.attention.")] = "1",
    rows: Annotated[str | None, typer.Option(help="Rows of a microbatch, or several numbers with commas.")] = None,
    schedules: Annotated[str | None, typer.Option(help="Names of schedules with commas. All if left out.")] = None,
    recompute: Annotated[str | None, typer.Option(help=_RECOMPUTE_HELP)] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, momentum, sgd, or its bytes for each element.")] = "adamw",
    tensor_plan: Annotated[str | None, typer.Option(help=_SHARED_HELP.format("tp"))] = None,
    expert_plan: Annotated[str | None, typer.Option(help=_SHARED_HELP.format("ep"))] = None,
    float8: Annotated[str | None, typer.Option(help=_FLOAT8_HELP)] = None,
    backend: Annotated[Literal["inductor", "eager"], typer.Option(help="Fused kernels, or one by operator.")] = "inductor",
    work: Annotated[int | None, typer.Option(min=1, help="How many computations the search simulates.")] = None,
    offload: Annotated[bool, typer.Option(help="Whether saved values may wait in the host's memory, as few as fit.")] = True,
    like: Annotated[str | None, typer.Option(help=_LIKE_HELP)] = None,
    search: Annotated[bool, typer.Option(help="Whether to search; without, the layout of --like alone is priced.")] = True,
    save: Annotated[Path | None, typer.Option(help="A file for the best plan, for graphpp.TrainingPlan.from_json.")] = None,
    html: Annotated[Path | None, typer.Option(help="A file for a page of all plans, to look at in a browser.")] = None,
    front: Annotated[bool, typer.Option("--front", help="Print the plans of the front of time and memory.")] = False,
    tokens: Annotated[float | None, typer.Option(min=1, help="Tokens of the training: print its days.")] = None,
    price: Annotated[str | None, typer.Option(help=_PRICE_HELP)] = None,
    mtbf: Annotated[float | None, typer.Option(min=0, help=_MTBF_HELP)] = None,
    checkpoint: Annotated[float | None, typer.Option(min=0, help="Seconds for which a save stops the training.")] = None,
    restart: Annotated[float | None, typer.Option(min=0, help="Seconds from a failure to the next step.")] = None,
) -> Answer:
    """Find the fastest plan to train a model on machines that need not be there: mesh, stages, schedule, microbatches, memory.

    The model is built on the meta device and takes no memory. Several machines, batches or lengths with commas make a table of
    the best plans. Exit code 1 where no plan fits the memory.
    """
    from graphpp.cli.models import load_model  # load torch, which help pages need not
    from graphpp.cluster_planner.plans.plan import plan as find

    prices = None if price is None else tuple(map(_dollars, _listed(price)))
    training = Training(tokens, prices, mtbf, checkpoint, restart)
    known = [devices.read_machines(each, read_machines) for each in _listed(machines)]
    for each in known:
        training.hourly(each)  # refuses prices before the search
    lengths: Sequence[int | None] = _sizes("length", length) or [None]
    questions = [Question(*each) for each in product(lengths, known, _sizes("batch", batch) or [])]
    sizes = {name: _sizes(name, text) for name, text in (("pp", pp), ("tp", tp), ("ep", ep), ("cp", cp), ("rows", rows))}
    searched: dict[str, Any] = {
        **sizes,
        "memory_cap": None if cap is None else _caps(cap),
        "schedules": None if schedules is None else _listed(schedules),
        "recompute": None if recompute is None else [_number(each) for each in _listed(recompute)],
        "work": work,
    }
    searched = {name: each for name, each in searched.items() if each is not None}
    searched |= {"backend": backend, "optimizer": _number(optimizer), "param_dtype": _dtype(dtype), "offload": offload}
    captured: dict[str, Any] = {
        "tensor_plan": None if tensor_plan is None else _styles("--tensor-plan", tensor_plan),
        "expert_plan": None if expert_plan is None else _styles("--expert-plan", expert_plan),
        "float8": None if float8 is None else _styles("--float8", float8) if "=" in float8 else float8,
    }
    if len(questions) > 1:
        alone = {"--like": like, "--no-search": not search, "--save": save, "--html": html, "--front": front}
        if any(alone.values()):
            name = next(name for name, given in alone.items() if given)
            raise GraphPPError(f"{name}: it is for one search: give one of --machines, --batch and --length, or leave it out")
        return plan_table(model, questions, captured | {"param_dtype": searched["param_dtype"]}, searched, training)
    (question,) = questions
    loaded = load_model(model, length=question.length, meta=True, length_needed=True)
    try:
        found = find(
            loaded.model, loaded.loss, loaded.example, machines=question.machines, batch=question.batch, like=like,
            search=search, **captured, **searched,
        )  # fmt: skip
    except NoPlanError as error:
        return Answer(str(error), {"plans": [], "message": str(error)}, yes=False)
    found = replace(found, asked={**found.asked, "model": f"{model}, {found.asked['model']}"})
    files = (save, found.best.to_json), (html, found.to_html)
    notes = [write_text(file, text()) for file, text in files if file is not None]
    text = "\n\n".join(map(str, found.front)) if front else str(found)
    numbers = training.numbers(found.best, question.machines)
    document = json.loads(found.to_json()) | ({"training": numbers} if numbers else {})
    return Answer("\n".join([text, *([spelled(numbers)] if numbers else [])]), document, notes=notes)


def compare(
    first: Annotated[str, typer.Argument(metavar="FILE[:NUMBER]", help=_FIRST_HELP)],
    second: Annotated[str, typer.Argument(metavar="FILE[:NUMBER]", help="The second plan, in the same form.")],
) -> Answer:
    """Show two plans side by side: their choices, and the differences of their seconds, bytes and bytes sent."""
    found = _plan(first).compare(_plan(second))
    return Answer(str(found), found.document())


def _plan(text: str) -> TrainingPlan:
    """The plan `FILE[:NUMBER]`. Raises `GraphPPError` for a number that the file lacks."""
    yours = re.fullmatch(r"(.+):yours", text)
    if yours is not None and (found := _plans(Path(yours[1])).yours) is not None:
        return found
    numbered = re.fullmatch(r"(.+):([0-9]{1,9})", text)
    file, number = (numbered[1], int(numbered[2])) if numbered and not Path(text).exists() else (text, 1)
    plans = _plans(Path(file)).plans
    if not 1 <= number <= len(plans):
        raise GraphPPError(f"{text}: the file has plans 1 to {len(plans)}")
    return plans[number - 1]


def _plans(file: Path) -> TrainingPlans:
    from graphpp.cluster_planner.plans.found_plans import TrainingPlans  # loads torch, which help pages need not

    return TrainingPlans.from_json(file)


def report(
    file: Annotated[Path, typer.Argument(help=_FILE_HELP)],
    output: Annotated[Path, typer.Option(help="The file of the page.")] = Path("report.html"),
) -> Answer:
    """Write a page of plans: time against bytes, each plan in full. The page needs no network."""
    found = _plans(file)
    note = write_text(output, found.to_html())
    return Answer(str(found.best), {"plans": len(found), "page": str(output)}, notes=[note])


def read_machines(text: str) -> Machines:
    """Machines from "<count>x<device>", or from a JSON file of their fields.

    `device` may be a known name there, or the name of a calibrated device's file, beside the file itself or with its folder.
    """
    if not text.endswith(".json") or (re.match(r"\s*[0-9]+\s*x", text) and not Path(text).exists()):
        return Machines.read(text)
    from graphpp.from_json import document, read

    try:
        given = document(Path(text), "machines")
        if "measured" in given:
            raise GraphPPError(f"machines: the file has one device: say how many there are, e.g. 8x{text}")
        if isinstance(given.get("device"), str):
            name = given["device"]
            given["device"] = Device.load(Path(text).parent / name) if name.endswith(".json") else known_device(name)
            if given["device"] is None:
                raise GraphPPError(f"machines.device: {name!r} is no known device: take {KNOWN_NAMES}; or give its fields")
        found: Machines = read(Machines, given, "machines")
    except GraphPPError as error:
        raise GraphPPError(f"--machines {text}: {error}") from error
    return found


def _sizes(name: str, text: str | None) -> Sequence[int] | None:
    if text is None:
        return None
    parts = _listed(text)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise GraphPPError(f"--{name}: take a positive number, or several with commas, got {text!r}")
    return [int(part) for part in parts]


def _caps(text: str) -> int | list[int]:
    found = [forms.read_bytes("--cap", each) for each in _listed(text)]
    return found[0] if len(found) == 1 else found


def _dollars(text: str) -> float:
    found = _number(text)
    if not isinstance(found, float) or not 0 <= found < inf:
        raise GraphPPError(f"--price: take dollars of a GPU hour, from 0, got {text!r}")
    return found


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _number(text: str) -> str | float | None:
    """The number that a text is, None for "none", or the text."""
    try:
        return float(text)
    except ValueError:
        return None if text == "none" else text


def _styles(option: str, text: str) -> dict[str, str | int]:
    """Styles by pattern from "pattern=style,.."."""
    pairs = [[part.strip() for part in each.split("=")] for each in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise GraphPPError(f"{option}: take pattern=style, or several with commas, got {text!r}")
    return {pattern: int(style) if style.lstrip("-").isdecimal() else style for pattern, style in pairs}


def _dtype(name: str) -> torch.dtype | None:
    """The dtype of a name; None for "own"."""
    import torch

    found = None if name == "own" else getattr(torch, name, None)
    if name != "own" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise GraphPPError(f'--dtype: take the name of a floating dtype of torch, e.g. bfloat16, or "own", got {name!r}')
    return found
