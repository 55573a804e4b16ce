"""The tutorials run, and print what their pages show; the first one from an empty environment to a checkpoint, by the clock."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.exhaustive import cases
from website.tutorials import PAGES, ROOT, SCRIPTS, commands, follow, run, same, scripts

CLOCK = 600.0  # seconds from an empty environment to a checkpoint and back; the page says five minutes
NAMES = [page.stem for page in PAGES]


def text(name: str) -> str:
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()


def test_the_scripts_are_those_of_the_pages() -> None:
    found = {name: source for page in NAMES for name, source in scripts(text(page)).items()}
    assert len(NAMES) == 9 and sum(len(scripts(text(page))) for page in NAMES) == len(found)
    assert found == {path.name: path.read_text() for path in SCRIPTS.glob("*.py")}, "run make tutorials"


@pytest.mark.parametrize("name", cases(NAMES, "vision"))
def test_a_tutorial_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    for (command, shown), found in zip(commands(text(name)), follow(text(name), tmp_path), strict=True):
        assert same(shown, found), f"{command}\n{found}\nthe page:\n{shown}"


def test_outputs_are_the_same_up_to_rounding_and_times() -> None:
    assert same("step 1: loss 2.4198, 3.1 ms\n", "step 1:  loss 2.4199, 12 s\n")
    for other in ("step 1: loss 2.4298", "step 2: loss 2.4198", "step 1: loss 2.4198\nmore", "step 1: loss -2.4198"):
        assert not same("step 1: loss 2.4198", other)


@pytest.mark.exhaustive
def test_from_an_empty_environment_to_a_checkpoint_in_ten_minutes(tmp_path: Path) -> None:
    """Installs as the first page says, with pip's own index, and follows the page there."""
    began, page = time.monotonic(), text("llama")
    install = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run(["bash", "-euc", install.replace("python3 ", f"{sys.executable} ")], cwd=clone, check=True)
    for name, source in scripts(page).items():
        (tmp_path / name).write_text(source)
    for command, shown in commands(page):
        assert same(shown, run(command, tmp_path, clone / "tutorial/bin/python", path="")), command
    assert time.monotonic() - began < CLOCK
