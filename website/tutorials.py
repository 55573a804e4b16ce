"""The pages of docs/tutorials/, their scripts in examples/tutorials/, and the output of their commands.

Contract
--------
- A page is the source. Its `python` blocks, in order, are its scripts: a block that begins with `# NAME.py` begins that script.
- A line `$ COMMAND` of a `console` block is run by bash, all commands of a page in order in one folder with its scripts. The
  lines below it are its standard output.
- `same` compares an output with the page's: numbers with a point agree to two units of their last digit, for another processor
  rounds in another way, and numbers with a unit of time or after "about", and the rates that Trainer prints, are measurements,
  which are not compared.
- `python website/tutorials.py [PAGE..]` (`make tutorials`) writes the scripts, the outputs into the pages, and pictures beside
  them.

Measured times on a page are those of the machine that wrote it last.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SCRIPTS = ROOT / "examples" / "tutorials"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
MEASURED = re.compile(r"about [\d.,]+|\b[\d.,]+ ?(?:µs|ms|s)\b|(?<=_runtime': ')[\d.]+|(?<=_per_second': ')[\d.]+")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


def scripts(page: str) -> dict[str, str]:
    """The scripts of a page by their names."""
    found: dict[str, list[str]] = {}
    for kind, source in BLOCK.findall(page):
        if kind == "python":
            if named := re.match(r"# (\w+\.py)\n", source):
                found[named[1]] = []
            found[list(found)[-1]].append(source)
    return {name: "\n".join(blocks) for name, blocks in found.items()}


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page, and the output that it shows of each."""
    return [pair for kind, text in BLOCK.findall(page) if kind == "console" for pair in COMMAND.findall(text)]


def run(command: str, folder: Path, python: Path = Path(sys.executable), path: str = str(ROOT)) -> str:
    """The standard output of a command, with the programs beside `python` and the modules of `path`."""
    own = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    line = ["bash", "-euo", "pipefail", "-c", command]
    environment = {**os.environ, **own, **quiet}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout.replace(f"{folder}/", "")


def follow(page: str, folder: Path) -> list[str]:
    """The outputs of a page's commands, run in the folder."""
    for name, source in scripts(page).items():
        (folder / name).write_text(source)
    return [run(command, folder) for command, _ in commands(page)]


def same(shown: str, found: str) -> bool:
    """Whether an output is the page's, but for rounding and measurements."""
    texts = [re.sub(" +", " ", MEASURED.sub("TIME", each)) for each in (shown, found)]
    numbers = [NUMBER.findall(each) for each in texts]
    close = (abs(float(a) - float(b)) <= 2.001 * last_digit(a) for a, b in zip(*numbers, strict=False))
    return NUMBER.sub("NUMBER", texts[0]) == NUMBER.sub("NUMBER", texts[1]) and all(close)


def last_digit(number: str) -> float:
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def written(page: str, folder: Path) -> str:
    """The page with the outputs of its commands."""
    outputs = iter(follow(page, folder))

    def block(found: re.Match[str]) -> str:
        if found[1] != "console":
            return found[0]
        parts = (f"$ {command}\n{next(outputs)}" for command, _ in COMMAND.findall(found[2]))
        return f"```console\n{''.join(parts)}```"

    return BLOCK.sub(block, page)


def main() -> None:
    for page in [page for page in PAGES if page.stem in sys.argv[1:] or not sys.argv[1:]]:
        for name, source in scripts(page.read_text()).items():
            (SCRIPTS / name).write_text(source)
        with TemporaryDirectory() as folder:
            page.write_text(written(page.read_text(), Path(folder)))
            for picture in Path(folder).glob("*.svg"):
                shutil.copy(picture, page.parent)
        print(f"wrote {page.name}")


if __name__ == "__main__":
    main()
