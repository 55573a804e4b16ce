"""`graphpp doctor`: facts that are read, a table of defects that is backed, links that are measured."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphpp.cli import doctor
from graphpp.cli.torch_defects import DEFECTS, Defect
from graphpp.parallel.place import place_of
from tests.cli.running import document, run
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_versions_are_those_of_the_project() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least, beyond = (".".join(map(str, each)) for each in doctor.SUPPORTED)
    names = [re.match(r"[a-z][a-z0-9]*", each)[0] for each in needed]  # type: ignore[index]
    assert needed[0] == f"torch>={least},<{beyond}"
    assert sorted(doctor.REQUIRED) == sorted(set(names) - {"torch"})
    assert all(map(doctor.is_supported, ["2.11", "2.13", "2.15"]))
    assert not any(map(doctor.is_supported, ["1.13", "2.9", "2.10", "2.16", "3.0"]))


def test_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = SimpleNamespace(name="an accelerator", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    found = document("doctor")
    assert found["ok"] and found["links"] == []
    assert found["versions"]["torch"] == torch.__version__
    assert f"{torch.get_num_threads()} threads" in found["devices"][0]["name"]
    assert found["devices"][2] == {"device": "cuda:1", "name": "an accelerator", "bytes": 80 * 2**30}
    assert ("gloo" in found["backends"]) is dist.is_gloo_available()
    assert "cuda:1: an accelerator, 80.0 GiB\n" in run("doctor").stdout


def test_a_machine_on_which_graphpp_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SUPPORTED", ((1, 0), (1, 9)))
    monkeypatch.setattr(doctor, "REQUIRED", (*doctor.REQUIRED, "no-such-library"))
    found = document("doctor", code=1)
    assert (found["ok"], found["torch_supported"], found["missing"]) == (False, False, ["no-such-library"])
    text = run("doctor").stdout
    assert "IS NOT SUPPORTED" in text
    assert re.search(r"no-such-library *MISSING", text)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.what[:30])
def test_a_defect_is_backed_by_a_test(defect: Defect) -> None:
    path, _, name = defect.test.partition("::")
    assert f"def {name}" in (ROOT / path).read_text()


def test_the_state_of_a_defect_is_known_for_the_versions_tried() -> None:
    states = {version: DEFECTS[0].state(version) for version in ("2.12", "2.13", "2.15", "2.16")}
    assert states == {"2.12": "not tried", "2.13": "present", "2.15": "gone", "2.16": "not tried"}


def links_of(rank: int) -> list[dict[str, Any]]:
    return doctor.measure_links(place_of(None, None, None), 4096, 2)


def test_every_rank_knows_every_link() -> None:
    first, *others = run_ranks(links_of, 3)
    assert [link["ranks"] for link in first] == [(0, 1), (1, 2), (2, 0)]
    assert all(link["latency"] > 0 and link["bandwidth"] > 0 for link in first)
    assert others == [first, first]
