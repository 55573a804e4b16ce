"""`graphpp dump diff`: two dumps compared file by file."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import graphpp
from graphpp.cli.dump_diff import diff_dumps
from tests.cli.running import document, refusal, run


def dumped(folder: Path, **options: object) -> Path:
    """The dump of one step of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    pipe = graphpp.compile(model, nn.functional.mse_loss, microbatches=2, debug=folder, **{"split": ["2"], **options})  # type: ignore[arg-type]
    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("dumps")
    one = dumped(base / "one")
    return {
        "one": one,
        "same": dumped(base / "same"),
        "later": dumped(base / "later", split=["3"]),
        "zero": dumped(base / "zero", schedule="ZB1P"),
    }


def test_two_runs_of_one_program_are_the_same(folders: dict[str, Path]) -> None:
    for inside in ("", "rank0", "rank0/train"):
        found = document("dump", "diff", folders["one"] / inside, folders["same"] / inside)
        assert found["same"]
        assert found["changed"] == {}
        assert found["equal"] > 8
        assert found["versions"] == [[f"torch {torch.__version__}, graphpp {graphpp.__version__}"]] * 2


def test_the_lines_that_differ(folders: dict[str, Path]) -> None:
    found = document("dump", "diff", folders["one"], folders["later"], code=1)
    backward = found["changed"]["rank0/train/programs/stage0_backward.py"]
    assert f"--- {folders['one']}/rank0/train/programs/stage0_backward.py" in backward
    assert f"+++ {folders['later']}/rank0/train/programs/stage0_backward.py" in backward
    assert any(line.startswith("+") and "tanh" in line for line in backward.splitlines())
    assert "rank0/train/capture_joint.py" not in found["changed"]
    assert not any(re.search(r"[0-9] ms\b", text) for text in found["changed"].values())


def test_files_of_one_dump_alone(folders: dict[str, Path]) -> None:
    result = run("dump", "diff", folders["one"], folders["zero"])
    assert result.exit_code == 1
    assert f"only in {folders['zero']}: rank0/train/programs/stage1_weight_grad.py" in result.stdout
    found = document("dump", "diff", folders["zero"], folders["one"], code=1)
    assert "rank0/train/programs/stage1_weight_grad.py" in found["only_in_a"]
    assert "rank0/train/programs/stage1_weight_grad.py" not in found["only_in_b"]


def test_numbers_of_passes_versions_and_times_do_not_count(tmp_path: Path) -> None:
    head = '"""train: joint\n\npass      0{}_cut, {}.5 ms\nversions  torch {}, graphpp 1\n'
    text = head + 'run       python 0{}_cut_joint.py [device]\n"""\n{}\n'
    for at, name in enumerate("ab", 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"0{at}_cut_joint.py").write_text(text.format(at, at, at, at, "same"))
        (tmp_path / name / "passes.txt").write_text(f"    pass  time  files\n0{at}  cut      {at}{at}.0 ms      3\n")
    found = diff_dumps(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert found.equal == 2
    assert "made by torch 1, graphpp 1, and by torch 2, graphpp 1" in str(found)
    (tmp_path / "b" / "02_cut_joint.py").write_text(text.format(2, 2, 2, 2, "other"))
    changed = diff_dumps(tmp_path / "a", tmp_path / "b", context=0)
    assert list(changed.changed) == ["cut_joint.py"]
    assert changed.changed["cut_joint.py"].splitlines()[-2:] == ["-same", "+other"]


def test_a_pass_that_ran_twice_keeps_its_numbers(tmp_path: Path) -> None:
    for name, last in (("a", "x"), ("b", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "01_cut_joint.py").write_text("first")
        (tmp_path / name / "02_cut_joint.py").write_text(last)
    found = diff_dumps(tmp_path / "a", tmp_path / "b")
    assert (list(found.changed), found.equal) == (["02_cut_joint.py"], 1)


def test_what_is_no_dump(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "notes.txt").write_text("no dump")
    assert "is no folder" in refusal("dump", "diff", folders["one"], tmp_path / "none")
    assert "has no dump of graphs" in refusal("dump", "diff", tmp_path, folders["one"])
    assert "is no folder" in refusal("dump", "diff", tmp_path / "notes.txt", folders["one"])
