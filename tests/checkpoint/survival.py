"""Kill a random rank at a random moment of a training, start all ranks again, and compare with an undisturbed training.

    python -m tests.checkpoint.survival --kills 200 [--seed 0]

A moment is before an action of a step, before or after an optimizer's step, before or after the files of a checkpoint are
written, or before a file or folder is renamed. Half of the trainings save in one folder. The other half save in the folders of
two machines, and the folder of the killed rank's machine is lost. Checked each time: the other ranks end within `ENDS` seconds,
with an error that names the lost rank or refuses to go on; a second start, on the same or another number of ranks and under
another schedule, goes on from the last complete checkpoint; losses and parameters at the end are bit-equal.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.checkpoint import folder as folders
from graphpp.checkpoint import local as local_folders
from graphpp.errors import GraphPPError
from graphpp.runtime.action_loop import ActionLoop
from tests.distributed import WorkerDied, rank_outcomes, run_ranks

ENDS = 30.0  # seconds in which the other ranks end
STEPS = 4
LAYERS = 8
LAYOUTS: dict[int, list[tuple[str, int]]] = {  # ranks -> (schedule, stages)
    1: [("GPipe", 2), ("1F1B", 1)],
    2: [
        *(("GPipe", 2), ("1F1B", 2), ("Interleaved1F1B", 4), ("InterleavedZeroBubble", 4)),
        *(("ZBVZeroBubble", 4), ("DualPipeV", 4)),
    ],
    4: [("1F1B", 4), ("Interleaved1F1B", 8), ("LoopedBFS", 8), ("ZBVZeroBubble", 8), ("DualPipeV", 8)],
}


@dataclass(frozen=True)
class Layout:
    """The ranks, the schedule and the number of stages of a start."""

    ranks: int
    schedule: str
    stages: int

    @classmethod
    def drawn(cls, ranks: int, draw: random.Random) -> Layout:
        """A random layout on so many ranks."""
        return cls(ranks, *draw.choice(LAYOUTS[ranks]))


@dataclass(frozen=True)
class Kill:
    """The rank that is killed, and the number of its moments before that."""

    rank: int
    moment: int


@dataclass(frozen=True)
class Ended:
    """A training that came to its end.

    `losses` of all steps, this rank's `entries`, the `moments` passed, the clock after the `first_step` (0.0: there was none to
    do), and the step from which the training went on.
    """

    losses: list[float]
    entries: dict[str, Tensor]
    moments: int
    first_step: float
    resumed_at: int


@dataclass(frozen=True)
class Survived:
    """One kill: seconds until the last of the other ranks ended, and to the next step; the step from which the job went on."""

    case: str
    ended: float
    back: float
    resumed_at: int


class Moments:
    """Counts the moments of a rank, and kills the process at one of them."""

    def __init__(self, kill: int | None) -> None:
        self.passed, self._kill = 0, kill

    def tick(self, *_: Any) -> None:
        """A moment."""
        if self.passed == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context in which actions and files are moments."""
        run, write, rename, replace = ActionLoop.run, folders.write_entries, Path.rename, Path.replace

        def acting(loop: ActionLoop, watch: Any = None) -> None:
            def watched(action: Any, function: Callable[[], None]) -> None:
                self.tick()
                function()

            run(loop, watch or watched)

        def writing(*arguments: Any) -> None:
            self.tick()
            write(*arguments)
            self.tick()

        def renaming(path: Path, target: Path) -> Path:
            self.tick()
            return rename(path, target)

        def replacing(path: Path, target: Path) -> Path:
            self.tick()
            return replace(path, target)

        with (
            patch.object(ActionLoop, "run", acting),
            patch.object(folders, "write_entries", writing),
            patch.object(local_folders, "write_entries", writing),
            patch.object(Path, "rename", renaming),
            patch.object(Path, "replace", replacing),
        ):
            yield


def model() -> nn.Sequential:
    """Layers with dropout, whose masks a resumed training must repeat."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(LAYERS)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The data of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def machine(folder: Path, rank: int, ranks: int) -> Path:
    """The folder of the machine of a rank: half of the ranks are on each of two machines."""
    return folder / f"machine{2 * rank // ranks}"


def train(rank: int, folder: Path, layout: Layout, kill: Kill | None, local: bool) -> Ended:
    """Train `STEPS` steps with a checkpoint after each, from the latest complete checkpoint on; `local`: of two machines."""
    torch.set_num_threads(1)
    moments = Moments(kill.moment if kill is not None and kill.rank == rank else None)
    step = LAYERS // layout.stages
    x, y = batch(0)
    pipe = graphpp.compile(
        model(),
        F.mse_loss,
        example=graphpp.Microbatch((x[:1],), target=y[:1]),
        split=[str(layer) for layer in range(step, LAYERS, step)] or None,
        schedule=layout.schedule,
        microbatches=8,
        parallel=graphpp.Parallel(timeout=ENDS / 2),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    checkpoint = pipe.checkpoint(optimizer, extra={"losses": []})
    if local:
        saves = checkpoint.local(machine(folder, rank, layout.ranks))
        loaded, save = saves.load(missing_ok=True), saves.save
    else:
        loaded, save = checkpoint.load(folder, missing_ok=True), partial(checkpoint.save, folder)
    resumed_at = pipe.steps if loaded else 0
    first_step = 0.0
    with moments.counted():
        while pipe.steps < STEPS:
            x, y = batch(pipe.steps)
            checkpoint.extra["losses"].append(pipe.step(x, target=y).loss.item())
            first_step = first_step or time.monotonic()
            pipe.clip_grad_norm_(1.0)
            moments.tick()
            optimizer.step()
            moments.tick()
            pipe.zero_grad()
            save()
    entries = {key: value.clone() for key, value in pipe.state_dict().items()}
    return Ended(checkpoint.extra["losses"], entries, moments.passed, first_step, resumed_at)


def start(folder: Path, layout: Layout, local: bool) -> list[Ended]:
    """All ranks of a training that ends."""
    return run_ranks(train, layout.ranks, folder, layout, None, local)


def survive(draw: random.Random, expected: list[Ended]) -> Survived:
    """One kill and a second start. `expected`: the training that nobody disturbed. Raises `AssertionError`."""
    before = Layout.drawn(draw.choice([2, 4]), draw)
    after = Layout.drawn(draw.choice([1, 2, 4]), draw)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "latest"
        local = draw.random() < 0.5
        kill = Kill(draw.randrange(before.ranks), draw.randrange(_moments(before, local)))
        case = f"{before} {kill} then {after}, {'two machines' if local else 'one folder'}"
        began = time.monotonic()
        outcomes = rank_outcomes(train, before.ranks, folder, before, kill, local)
        lost = outcomes[kill.rank]
        others = "; ".join(f"rank {each.rank} after {each.seconds:.1f} s: {each.error!r}" for each in outcomes)
        assert isinstance(lost.error, WorkerDied), f"{case}: the rank lived: {others}"
        for other in outcomes:
            if other.rank != kill.rank and other.error is not None:
                assert isinstance(other.error, GraphPPError), f"{case}: rank {other.rank}: {other.error!r}"
                assert f"rank {kill.rank}" in str(other.error), f"{case}: rank {other.rank} does not name it: {other.error}"
        ended = max(other.seconds for other in outcomes) - lost.seconds
        assert ended < ENDS, f"{case}: the others took {ended:.1f} s"
        if local:
            lose_machine(folder, machine(folder, kill.rank, before.ranks), after.ranks)
        again = start(folder, after, local)
        assert all(rank.losses == expected[0].losses for rank in again), f"{case}: {again[0].losses}"
        found = {key: value for rank in again for key, value in rank.entries.items()}
        whole = {key: value for rank in expected for key, value in rank.entries.items()}
        assert found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole), case
        back = max(rank.first_step for rank in again) - began - lost.seconds
        return Survived(case, ended, max(back, 0.0), again[0].resumed_at)


def lose_machine(folder: Path, lost: Path, ranks: int) -> None:
    """Remove what a machine had; a second start on one rank is on the machine that is left."""
    shutil.rmtree(lost, ignore_errors=True)
    if ranks == 1:
        for left in folder.glob("machine*"):
            left.rename(machine(folder, 0, 1))


_MOMENTS: dict[tuple[Layout, bool], int] = {}


def _moments(layout: Layout, local: bool) -> int:
    """The least number of moments that a rank of a training has."""
    if (layout, local) not in _MOMENTS:
        with tempfile.TemporaryDirectory() as scratch:
            _MOMENTS[layout, local] = min(rank.moments for rank in start(Path(scratch) / "latest", layout, local))
    return _MOMENTS[layout, local]


@cache
def undisturbed() -> list[Ended]:
    """The training that nobody disturbs, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        return [train(0, Path(scratch) / "latest", Layout(1, "1F1B", 1), None, False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    option = parser.parse_args()
    draw, expected = random.Random(option.seed), undisturbed()
    found, failed = list[Survived](), list[str]()
    for _ in track(range(option.kills), "kills", console=Console(stderr=True)):
        try:
            found.append(survive(draw, expected))
        except Exception as fault:
            failed.append(f"{type(fault).__name__}: {fault}")
    for text in failed:
        print(text)
    print(f"{len(found)} of {option.kills} kills survived")
    counts = Counter(each.resumed_at for each in found)
    print("went on from step: " + ", ".join(f"{step} {counts[step]} times" for step in sorted(counts)))
    for name, words in (("ended", "the others ended after"), ("back", "from the kill to the next step")):
        values = sorted(getattr(each, name) for each in found)
        print(f"{words}: median {statistics.median(values):.2f} s, most {values[-1]:.2f} s")


if __name__ == "__main__":
    main()
