"""Dumps: which files are written, when, by whom, and what stands in them; `test_standalone` runs them.

The golden dump stands in `tests/golden/dump`; `GOLDEN_UPDATE=1 pytest tests/compiler/test_dump.py` writes it anew.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphpp
from graphpp.errors import GraphPPError
from graphpp.passes.text.render import RenderedGraph
from graphpp.pipeline.pipeline import Pipeline
from graphpp.schedules.table.schedule import Schedule
from tests.distributed import run_ranks
from tests.models import MODELS, Case, cuts
from tests.reference import gradients

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/dump"
MICROBATCHES = 8


def stepped(name: str, folder: Path | None) -> tuple[Case, Pipeline, Tensor]:
    """One of the test models in two stages, with its dump in `folder`, and the losses of one step."""
    case = MODELS[name]()
    pipe = graphpp.compile(case.model, case.loss, split=cuts(name, 2), microbatches=MICROBATCHES, debug=folder)
    return case, pipe, pipe.step(*case.batch.args, target=case.batch.target, **case.batch.kwargs).losses


def files(folder: Path) -> list[str]:
    """The files below a folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def body(file: Path) -> str:
    """A dumped file without its docstring."""
    return after_docstring(file.read_text())


def after_docstring(text: str) -> str:
    return text.partition('"""')[2].partition('"""')[2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 0's dump of one training step and one evaluation of the Llama."""
    folder = tmp_path_factory.mktemp("llama")
    case, pipe, _ = stepped("llama", folder)
    pipe.eval(*case.batch.args)
    return folder / "rank0"


def normalised(text: str) -> str:
    """Without times, versions, folders, and the part that is the same in every file."""
    text = re.sub(r"[ \d.]+ ms", " 0.0 ms", text)
    text = re.sub(r"torch [^ ,]+, graphpp .*", "torch X, graphpp Y", text)
    return text.replace(f"{ROOT}/", "").partition("\n\n\ndef example(")[0]


def golden_name(file: str) -> Path:
    """Not `.py`: nobody should lint or import them."""
    return GOLDEN / f"{file}.txt" if file.endswith(".py") else GOLDEN / file


def rewrite(made: dict[str, str]) -> None:
    """Make the golden files what was made."""
    for file in (file for file in files(GOLDEN) if file != "model.py"):
        (GOLDEN / file).unlink()
    for file, text in made.items():
        golden_name(file).parent.mkdir(parents=True, exist_ok=True)
        golden_name(file).write_text(text)


def test_golden(tmp_path: Path) -> None:
    golden = runpy.run_path(str(GOLDEN / "model.py"))
    example = graphpp.Microbatch((torch.ones(4, 2),), {}, torch.ones(4, 3))
    graphpp.compile(golden["model"](), golden["loss"], split=["2"], microbatches=2, example=example, debug=tmp_path)
    folder = tmp_path / "rank0/train"
    same = ("_cut_stages_", "_hoist_per_step_")  # the programs show these graphs
    shown = [file for file in files(folder) if not any(name in file for name in same)]
    made = {file: normalised((folder / file).read_text()) for file in shown}
    if os.environ.get("GOLDEN_UPDATE"):
        rewrite(made)
    assert sorted(golden_name(file) for file in made) == [GOLDEN / file for file in files(GOLDEN) if file != "model.py"]
    for file, text in made.items():
        assert text == golden_name(file).read_text(), f"{file}: see GOLDEN_UPDATE at the head of this test"


def test_a_file_for_each_pass_that_changed_the_graph(llama: Path) -> None:
    folder = llama / "train"
    joints = [file for file in files(folder) if file.endswith("_joint.py")]
    assert joints[:2] == ["00_capture_joint.py", "01_clean_up_joint.py"]
    assert all(body(folder / before) != body(folder / after) for before, after in pairwise(joints))
    passes = [line.split() for line in (folder / "passes.txt").read_text().splitlines()]
    assert [f"{number}_{name}_joint.py" for number, name, *_, count in passes if count == "1"] == joints
    assert [name for _, name, *_ in passes[-3:]] == ["cut_stages", "hoist_per_step", "emit"]


def test_programs_are_what_the_last_pass_made(llama: Path) -> None:
    for program in (llama / "train/programs").iterdir():
        made = sorted((llama / "train").glob(f"??_*_{program.name}"))
        assert body(made[-1]) == body(program)


def test_what_runs_is_what_is_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, str] = {}
    load = RenderedGraph.load
    monkeypatch.setattr(RenderedGraph, "load", lambda self, name: loaded.setdefault(name, self.text) and load(self, name))
    stepped("sequential", tmp_path)
    programs = {file.stem: body(file) for file in tmp_path.glob("rank0/train/programs/*.py")}
    assert len(programs) == len(loaded) == 6
    for text in loaded.values():
        stage, phase = re.match(r'"""stage (\d+), (\w+)', text).groups()  # type: ignore[union-attr]
        assert programs[f"stage{stage}_{phase}"].startswith(after_docstring(text))


def test_schedule_loads_and_the_plan_is_the_pipeline_s(tmp_path: Path) -> None:
    _, pipe, _ = stepped("sequential", tmp_path)
    folder = tmp_path / "rank0/train"
    assert Schedule.load(folder / "schedule.csv").microbatches == MICROBATCHES
    assert str(pipe.plan) in (folder / "plan.txt").read_text()


def test_boundaries_name_what_crosses_and_what_is_saved(llama: Path) -> None:
    text = (llama / "train/boundaries.txt").read_text()
    value = r"    \w+  f32\[3, 16, 32\], 6.0 KiB, needs grad, in layers.1 \(.*llama.py:\d+\)"
    assert re.search(rf"boundary 0\|1 forward: 1 value, 6.0 KiB\n{value}\n", text)
    assert re.search(r"saved in stage 1: \d+ values, [\d.]+ KiB\n", text)


def test_an_earlier_run_s_files_go_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "rank0"
    old = ["train/07_split_stage9_forward.py", "train/programs/stage9_forward.py", "train_4/plan.txt"]
    mine = ["train/notes.md", "train_data/plan.txt", "train/programs/mine.py"]
    for file in old + mine:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    stepped("sequential", tmp_path)
    assert not set(old) & set(files(folder))
    assert set(mine) <= set(files(folder))
    assert not (folder / "train_4").exists()


@pytest.mark.parametrize(
    "below", ["", "rank0", "rank0/train", "rank0/train/00_capture_joint.py", "rank0/train/plan.txt"]
)
def test_a_folder_that_cannot_be_written_raises(tmp_path: Path, below: str) -> None:
    blocked = tmp_path / "dump" / below
    if blocked.suffix:
        (blocked / "a folder").mkdir(parents=True)
    else:
        blocked.parent.mkdir(parents=True, exist_ok=True)
        blocked.write_text("a file")
    with pytest.raises(GraphPPError, match=r"the dump cannot be written: .*dump.*GRAPHPP_DUMP"):
        stepped("sequential", tmp_path / "dump")


def test_a_dump_changes_no_number_and_without_one_nothing_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped, _, losses = stepped("llama", tmp_path)
    monkeypatch.setattr("graphpp._torch.aot.tracing", lambda: False)  # pytest listens to every log
    monkeypatch.setattr("graphpp.compiler.dumps.dump.render", None)
    monkeypatch.setattr("graphpp.compiler.dumps.dump.standalone", None)
    plain, _, expected = stepped("llama", None)
    assert torch.equal(losses, expected)
    reference = gradients(plain.model)
    for fqn, gradient in gradients(dumped.model).items():
        assert torch.equal(gradient, reference[fqn]), fqn  # type: ignore[arg-type]


def dump_on(rank: int, folder: str) -> None:
    """One step of the Sequential on each rank."""
    case = MODELS["sequential"]()
    pipe = graphpp.compile(case.model, case.loss, split=cuts("sequential", 2), microbatches=3, debug=folder)
    pipe.step(*case.batch.args, target=case.batch.target)


def test_each_rank_writes_its_stages_and_what_it_captured(tmp_path: Path) -> None:
    run_ranks(dump_on, 2, str(tmp_path))
    folders = [tmp_path / f"rank{rank}/train" for rank in (0, 1)]
    for rank, folder in enumerate(folders):
        assert {path.name[:6] for path in folder.glob("programs/*.py")} == {f"stage{rank}"}
        assert {"plan.txt", "schedule.csv", "boundaries.txt"} <= set(files(folder))
    assert [path.name for path in folders[1].glob("*_joint.py")] == ["00_capture_joint.py"]
    assert (folders[0] / "01_clean_up_joint.py").exists()
    assert body(folders[0] / "00_capture_joint.py") == body(folders[1] / "00_capture_joint.py")
    assert "0SEND_F0" in (folders[1] / "schedule.csv").read_text()


# ------------------------------------------------------------------------------------------------------------ the trace

TRACED = """
import torch, graphpp
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
pipe = graphpp.compile(model, nn.functional.mse_loss, split=["1"], microbatches=2)
pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
"""


def traced(folder: Path, dump: Path) -> dict[str, str]:
    """The artefacts of graphpp in the trace of a process, by name."""
    environment = {**os.environ, "GRAPHPP_DUMP": str(dump), "TORCH_TRACE": str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", TRACED], check=True, env=environment, capture_output=True)
    (log,) = folder.iterdir()
    found: dict[str, str] = {}
    for record in re.split(r"^V\d{4} .*?\] (?={)", log.read_text(), flags=re.MULTILINE)[1:]:
        head, _, payload = record.partition("\n")
        name = json.loads(head).get("artifact", {}).get("name", "")
        if name.startswith("graphpp_"):
            found[name] = re.sub(r"^\t", "", payload, flags=re.MULTILINE)
    return found


@pytest.mark.exhaustive
def test_the_trace_has_the_same_texts(tmp_path: Path) -> None:
    artefacts = traced(tmp_path / "trace", tmp_path / "dump")
    folder = tmp_path / "dump/rank0/train"
    names = {f"graphpp_train_{file.replace('/', '_')}": file for file in files(folder)}
    assert set(artefacts) == set(names)
    for name, text in artefacts.items():
        assert text.rstrip("\n") == (folder / names[name]).read_text().rstrip("\n"), name
