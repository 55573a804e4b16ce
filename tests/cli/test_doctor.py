"""`graphpp doctor`: facts that are read, a table of defects that is backed, links that are measured."""

import re
import shutil
import stat
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from graphpp.cli.doctor import machine
from graphpp.cli.doctor.links import Link, measure_links, pairs
from graphpp.cli.doctor.torch_defects import DEFECTS
from graphpp.errors import GraphPPError
from graphpp.parallel.place import place_of
from tests.cli.running import document, run
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_versions_are_those_of_the_project(project: dict[str, list[str]]) -> None:
    least, beyond = (".".join(map(str, each)) for each in machine.SUPPORTED)
    names = [re.match(r"[a-z][a-z0-9]*", each)[0] for each in project["dependencies"]]  # type: ignore[index]
    assert project["dependencies"][0] == f"torch>={least},<{beyond}"
    assert sorted(machine.REQUIRED) == sorted(set(names) - {"torch"})


def test_supported_versions() -> None:
    assert all(map(machine.is_supported, ["2.11", "2.13", "2.15"]))
    assert not any(map(machine.is_supported, ["1.13", "2.9", "2.10", "2.16", "3.0"]))


def test_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = document("doctor")
    assert found["ok"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["threads"] == torch.get_num_threads()
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert ("gloo" in found["backends"]) is dist.is_gloo_available()
    assert (found["matrix_libraries"]["onednn"] is not None) is torch.backends.mkldnn.is_available()
    assert found["links"] == []


def test_accelerators_are_listed_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = SimpleNamespace(name="an accelerator", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    assert machine.devices()[1:] == [
        {"device": f"cuda:{index}", "name": "an accelerator", "bytes": 80 * 2**30} for index in range(2)
    ]
    assert "cuda:1: an accelerator, 80.0 GiB\n" in run("doctor").stdout


def test_a_machine_on_which_graphpp_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(machine, "torch_release", lambda: "2.16")
    monkeypatch.setattr(machine, "REQUIRED", (*machine.REQUIRED, "no-such-library"))
    found = document("doctor", code=1)
    assert (found["ok"], found["torch_supported"], found["missing"]) == (False, False, ["no-such-library"])
    text = run("doctor").stdout
    assert "torch 2.16 IS NOT SUPPORTED" in text
    assert re.search(r"no-such-library +MISSING", text)


CONFIG = """PyTorch built with:
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64 architecture applications
  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)
  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release, LAPACK_INFO=open,
"""


def test_the_libraries_of_matrix_products() -> None:
    found = machine.matrix_libraries(CONFIG)
    assert found == {"blas": "mkl", "lapack": "open", "mkl": "2024.2-Product", "onednn": "3.12.0"}
    assert machine.matrix_libraries("") == {"blas": None, "lapack": None, "mkl": None, "onednn": None}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_that_works() -> None:
    assert machine.compile_fault("g++") is None


def test_compilers_that_do_not_work(tmp_path: Path) -> None:
    assert "No such file" in str(machine.compile_fault(str(tmp_path / "none")))
    for text, said in (("echo fatal error: omp.h >&2; exit 1", "fatal error: omp.h"), ("exit 3", "exit code 3")):
        command = tmp_path / "compiler"
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(command.stat().st_mode | stat.S_IEXEC)
        assert machine.compile_fault(str(command)) == said


def test_a_fault_of_the_compiler_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(machine, "compile_fault", lambda command: "Python.h: No such file")
    result = run("doctor")
    assert result.exit_code == 0
    assert 'backend="inductor" will not work: ' in result.stdout


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.what[:30])
def test_a_defect_is_backed_by_a_test(defect: object) -> None:
    path, _, name = defect.test.partition("::")  # type: ignore[attr-defined]
    assert f"def {name}" in (ROOT / path).read_text()


def test_the_state_of_a_defect_is_known_for_the_versions_tried() -> None:
    shapes = DEFECTS[0]
    states = {version: shapes.state(version) for version in ("2.12", "2.13", "2.14", "2.15", "2.16")}
    assert states == {"2.12": "not tried", "2.13": "present", "2.14": "not tried", "2.15": "gone", "2.16": "gone"}


# ---------------------------------------------------------------------------------------------------------------- links


def test_pairs() -> None:
    assert pairs(2) == [(0, 1)]
    assert pairs(4) == [(0, 1), (1, 2), (2, 3), (3, 0)]


def links_of(rank: int) -> list[Link]:
    return measure_links(place_of(None, None, None), 4096, 2)


def test_every_rank_knows_every_link() -> None:
    first, *others = run_ranks(links_of, 3)
    assert [link.ranks for link in first] == pairs(3)
    assert all(link.latency > 0 and link.bandwidth > 0 for link in first)
    assert len({link.hosts for link in first}) == 1
    assert others == [first, first]


def too_small(rank: int) -> str:
    with pytest.raises(GraphPPError) as caught:
        measure_links(place_of(None, None, None), 1, 2)
    return str(caught.value)


def test_a_message_that_is_too_small_is_refused_on_all_ranks() -> None:
    assert run_ranks(too_small, 2) == ["--size, --repeats: take at least 8 bytes and one message, got 1 and 2"] * 2
