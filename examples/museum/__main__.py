"""`python examples/museum`: run all cases, print their outcomes, and write the pages with `--write` (`make museum`).

`python examples/museum numbers hangs/fewer_microbatches` runs a part. Each case is a process of its own, at most `--jobs` at a
time. Exits with 1 if graphpp's outcome of a case is not as claimed.
"""

import argparse
import ast
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import networkx
import torch
import torch._functorch.aot_autograd
import torch.distributed.pipelining
import torch.export._trace

import graphpp

IMPORTED = (networkx, torch, graphpp)  # by this process, so that no case spends seconds on it
HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
GROUPS = {  # folder -> the title of its page, and what its complaints are about
    "numbers": ("Numbers", "Losses and gradients that differ from one process, mostly without an error."),
    "hangs": ("Hangs", "Steps that never end, and ranks that wait for ranks that are gone."),
    "memory": ("Memory", "Bytes that a rank should not hold."),
    "compile": ("Models and compilers", "Models that a tracer or a compiler refuses."),
    "checkpoints": ("Checkpoints", "State that cannot be saved, loaded, or carried to another layout."),
    "shapes": ("Shapes and arguments", "Batches, sizes and arguments that a pipeline does not take."),
}
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "torchtitan")
_CHILD = multiprocessing.get_context("fork")
_SECONDS = 300  # that a case may take, on a busy machine


@dataclass(frozen=True)
class Case:
    """A file of the museum, from its docstring."""

    path: Path
    title: str
    url: str
    situation: str

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"


@dataclass(frozen=True)
class Outcome:
    """What a case printed."""

    case: Case
    theirs: str
    ours: str
    passed: bool
    errors: str


def cases(names: Iterable[str] = ()) -> list[Case]:
    """All cases in order, or those of the groups and cases with these names."""
    paths = [path for group in GROUPS for path in sorted((HERE / group).glob("*.py")) if path.name != "museum.py"]
    found = [_read(path) for path in paths]
    wanted = {name.removesuffix(".py") for name in names}
    unknown = wanted - {case.name for case in found} - GROUPS.keys()
    if unknown:
        raise SystemExit(f"no such group or case: {', '.join(sorted(unknown))}")
    return [case for case in found if not wanted or {case.name, case.path.parent.name} & wanted]


def _read(path: Path) -> Case:
    title, url, *situation = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
    return Case(path, title.strip(), url.strip(), " ".join("\n\n".join(situation).split()))


@dataclass(frozen=True)
class Running:
    """A case's process, which starts with what this process has imported, and the file with its output."""

    case: Case
    process: BaseProcess
    output: IO[str]
    started: float

    @classmethod
    def start(cls, case: Case) -> "Running":
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `outcome`
        process = _CHILD.Process(target=_run, args=(case.path, output.fileno()))
        process.start()
        return cls(case, process, output, time.monotonic())

    @property
    def late(self) -> bool:
        return time.monotonic() - self.started > _SECONDS

    def outcome(self) -> Outcome:
        """The outcome of a case that has ended, or is late and is killed."""
        alive = self.process.is_alive()
        if alive:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        with self.output:
            self.output.seek(0)
            text = self.output.read()
        lines = dict(line.split(": ", 1) for line in text.splitlines() if line.startswith(("theirs: ", "ours: ")))
        passed = self.process.exitcode == 0 and len(lines) == 2
        ours = f"no end within {_SECONDS} s" if alive else lines.get("ours", "")
        return Outcome(self.case, lines.get("theirs", ""), ours, passed, text)


def run(chosen: Iterable[Case], jobs: int) -> Iterator[Outcome]:
    """The outcomes of cases, as they end; `jobs` at a time."""
    waiting, running = list(chosen), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Running.start(waiting.pop(0)))
        connection.wait([each.process.sentinel for each in running], 1)
        ended = [each for each in running if each.late or not each.process.is_alive()]
        running = [each for each in running if each not in ended]
        yield from (each.outcome() for each in ended)


def _run(path: Path, output: int) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.path.insert(0, str(path.parent))
    code = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # what this process has inherited is not its own to end


def pages(outcomes: list[Outcome]) -> Iterator[tuple[Path, str]]:
    """The pages of the museum: one with the groups, and one for each group."""
    yield DOCS / "museum.md", _overview(outcomes)
    for group, (title, about) in GROUPS.items():
        rows = [_row(each) for each in outcomes if each.case.path.parent.name == group]
        head = f"# Museum: {title.lower()}\n\n{about} [The museum](../museum.md) says how these outcomes were measured.\n"
        table = "\n".join(["| situation | theirs | graphpp |", "|---|---|---|", *rows])
        yield DOCS / "museum" / f"{group}.md", f"{head}\n{table}\n"


def _row(outcome: Outcome) -> str:
    case = outcome.case
    source = f"../../examples/museum/{case.name}.py"
    thread = "#".join(case.url.removeprefix("https://github.com/").replace("/pull/", "/issues/").rsplit("/issues/", 1))
    situation = f"[{case.title}]({source}) [{thread}]({case.url})"
    return f"| {situation} | {_plain(outcome.theirs)} | {_plain(outcome.ours)} |"


def _plain(text: str) -> str:
    """Text of an error, safe in a cell of a table."""
    return re.sub(r"(`[^`]*`)|([\\[*_<])", lambda found: found[1] or f"\\{found[2]}", text.replace("|", "/"))


def _overview(outcomes: list[Outcome]) -> str:
    groups = []
    for group, (title, about) in GROUPS.items():
        own = [each for each in outcomes if each.case.path.parent.name == group]
        mended = sum(each.theirs.startswith("no longer fails") for each in own)
        absent = sum(each.theirs.endswith("not run") for each in own)
        refused = sum(each.ours.startswith("refused") for each in own)
        counts = (len(own), len(own) - mended - absent, mended, absent, refused)
        groups.append(f"| [{title}](museum/{group}.md) | {about} | {' | '.join(str(count or '') for count in counts)} |")
    today, versions = f"{datetime.now(UTC):%Y-%m-%d}", ", ".join(_versions())
    return _OVERVIEW.format(date=today, versions=versions, count=len(outcomes), groups="\n".join(groups))


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue


_OVERVIEW = """# Museum of complaints

Written by `make museum` on {date} with {versions}; CPU, gloo.

The museum holds {count} public complaints about pipeline parallelism. Each case is a file of at most 60 lines in
`examples/museum/`: it states the situation and its thread, runs the way of the complaint in torch, transformers, accelerate
or torchtitan, and runs graphpp. Cases about other packages, such as DeepSpeed, show graphpp alone. The outcome of the other
package is measured. graphpp's outcome is asserted, against plain gradient accumulation in one process wherever numbers count.

```bash
make museum                                               # all cases; a failure of graphpp's is an error
.venv/bin/python examples/museum/numbers/tied_weights.py  # one case
```

| group | complaints about | cases | fail there | no longer | not run | refused by graphpp |
|---|---|---|---|---|---|---|
{groups}

- The column "theirs" of a group's page says what happened with the versions above. "no longer fails" says that this case
  does not fail with them.
- "not run" means that the case has no code for that package, or needs a GPU. The thread says what happened there.
- "refused" means that graphpp raises an error with the remedy before the step, which the case asserts. For a deadlock and for a
  cap of bytes this is the wanted outcome; in the other cases graphpp cannot do it either.
- "no end within" some seconds means that the case was ended then. The timeout of the process group was longer, unless the row
  says so.
- Bytes of messages, gradients and activations in graphpp's column are those of `pipe.plan.memory`; bytes of parameters are
  counted in the process.
- A thread that asks for a feature counts as a complaint, and so does a pull request that mends a fault.
- The cases have tiny models and at most three ranks on one machine. Gloo often notices that a peer is gone where NCCL
  waits for a timeout.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the cases of the museum.")
    parser.add_argument("names", nargs="*", help="groups, or cases such as numbers/tied_weights; none: all")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (2)")
    parser.add_argument("--write", action="store_true", help="write docs/museum.md and docs/museum/")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    chosen = cases(arguments.names)
    outcomes = []
    for outcome in run(chosen, arguments.jobs):
        outcomes.append(outcome)
        print(f"{outcome.case.name}\n  theirs: {outcome.theirs}\n  ours:   {outcome.ours}", flush=True)
        if not outcome.passed:
            print(*outcome.errors.splitlines()[-12:], sep="\n", flush=True)
    outcomes.sort(key=lambda outcome: chosen.index(outcome.case))
    failed = [each.case.name for each in outcomes if not each.passed]
    print(f"{len(outcomes)} cases, {len(failed)} not as claimed{': ' if failed else ''}{', '.join(failed)}")
    if arguments.write and not arguments.names and not failed:
        for page, text in pages(outcomes):
            page.parent.mkdir(exist_ok=True)
            page.write_text(text)
            print(f"wrote {page.relative_to(DOCS.parent)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
