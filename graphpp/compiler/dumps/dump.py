"""Dump the graph after each pass as runnable files and as artifacts of torch's trace.

- Each rank and captured graph has a folder: `rank0/train`, `rank0/eval`. A further graph that this process captures for the
  same purpose goes to `rank0/train_2`. Files of an earlier process are removed.
- `NN_pass_joint.py`, `NN_pass_stage1_forward.py`: a graph that pass NN changed. `programs/stage1_forward.py`: a program that
  runs. `programs/stage0_forward_with_stage1_backward.py`: a woven program.
- Every rank writes the programs of its stages and the captured joint graph, so that differing ranks can be compared. Later
  joint graphs are equal on all ranks, and only rank 0 writes them.
- With TORCH_TRACE set, the texts are also artifacts `graphpp_train_NN_pass_joint.py`, with or without a folder.
- Without folder and trace nothing is rendered. Raises `GraphPPError` if a file cannot be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from graphpp._torch import aot
from graphpp.capture.trace import CapturedGraph
from graphpp.compiler.dumps.text import Pass, boundaries_text, passes_text, schedule_csv
from graphpp.errors import GraphPPError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import F, StagedGraphs
from graphpp.passes.lower import Hook, PassResult
from graphpp.passes.overlap.weave import WovenGraph
from graphpp.passes.text.render import RenderedGraph, code, render
from graphpp.passes.text.standalone import Origin, standalone
from graphpp.planner.plan import Plan
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.program import Phase, PipelineProgram, Program, WovenProgram
from graphpp.schedules.table.schedule import Schedule

_TEXTS = ("passes.txt", "boundaries.txt", "plan.txt", "schedule.csv")
_OURS = ("[0-9][0-9]_*.py", "programs/stage*.py", *_TEXTS)

# Folders that this process has written, for all of its pipelines.
_taken: set[Path] = set()


@dataclass(frozen=True)
class _Text:
    """The text of a graph. `name`: `joint` or e.g. `stage1_forward`; `final`: whether the text is the program that runs."""

    name: str
    title: str
    graph: fx.Graph
    rendered: RenderedGraph
    final: bool = False

    @property
    def code(self) -> str:
        """The text without its title."""
        return code(self.rendered.text)


class Dump:
    """The dump of one captured graph on one rank; `kind` is "train" or "eval"."""

    def __init__(self, folder: Path | None, rank: int, kind: str) -> None:
        """Raises `GraphPPError` where the folder cannot be written."""
        self._rank, self._kind = rank, kind
        self._folder = None if folder is None else _claim(folder / f"rank{rank}", kind)
        self._passes: list[Pass] = []
        self._last: dict[str, str] = {}  # name of a graph -> its text when it was last dumped
        self._cut: StagedGraphs | None = None
        self._woven = Counter[str]()

    def captured(self, captured: CapturedGraph) -> None:
        self._see(PassResult("capture", captured.seconds, captured.joint), ())

    def hook(self, schedule: Schedule) -> Hook:
        """The hook to call after each pass; `schedule` tells which stages are on this rank."""
        mine = [stage for stage, rank in schedule.rank_of_stage.items() if rank == self._rank]
        return lambda passed: self._see(passed, mine)

    def plan(self, plan: Plan, table: CheckedTable) -> None:
        """Dump the plan, and the table with its sends."""
        if self._cut is None:
            return
        texts = (
            passes_text(self._passes),
            boundaries_text(self._cut),
            f"{plan}\n\n{plan.schedule}\n",
            schedule_csv(table.running),
        )
        for file, text in zip(_TEXTS, texts, strict=True):
            self._write(file, text)

    def woven(self, made: WovenGraph, emitted: Program | WovenProgram, seconds: float) -> None:
        """Dump a woven program, or one in a new order over the one before. Further programs of the same parts are numbered."""
        if self._folder is None and not aot.tracing():
            return
        name = "_with_".join(f"stage{part.stage}_{self._phase(part.phase).label}" for part in made.parts)
        self._woven[name] += 1
        name += f"_{self._woven[name]}" if self._woven[name] > 1 else ""
        origin = Origin(f"{self._kind}: {made.title}, one microbatch each", "weave", seconds, f"{name}.py")
        rendered = replace(render(made.graph), text=emitted.source)
        self._write(f"programs/{name}.py", standalone(made.graph, rendered, origin))

    def _see(self, passed: PassResult, mine: Collection[int]) -> None:
        """Dump the texts that this rank writes and that the pass changed."""
        if self._folder is None and not aot.tracing():
            return
        texts = list(self._texts(passed.result, mine))
        new = [text for text in texts if text.final or text.code != self._last.get(text.name)]
        number = f"{len(self._passes):02d}_{passed.name}"
        self._passes.append(Pass(passed.name, passed.seconds, len(new)))
        for text in new:
            self._last[text.name] = text.code
            file = f"programs/{text.name}.py" if text.final else f"{number}_{text.name}.py"
            origin = Origin(text.title, number, passed.seconds, file.rpartition("/")[2])
            self._write(file, standalone(text.graph, text.rendered, origin))

    def _texts(self, result: JointGraph | StagedGraphs | PipelineProgram, mine: Collection[int]) -> Iterator[_Text]:
        match result:
            case JointGraph():
                if self._rank == 0 or not self._passes:
                    title = f"{self._kind}: the joint graph of one microbatch"
                    yield _Text("joint", title, result.graph, render(result.graph))
            case StagedGraphs():
                self._cut = result
                for (phase, stage), slot in result.graphs.items():
                    if stage in mine:
                        yield self._slot(stage, self._phase(phase), slot.graph, render(slot.graph))
                for stage, slot in result.hoisted.items():
                    if stage in mine:
                        yield self._slot(stage, slot.phase, slot.graph, render(slot.graph))
            case PipelineProgram():
                yield from self._programs(result, mine)

    def _programs(self, program: PipelineProgram, mine: Collection[int]) -> Iterator[_Text]:
        """The texts of the programs that run; example inputs and bound values come from the cut graphs."""
        assert self._cut is not None
        for stage in (program.stages[index] for index in mine):
            graphs = {phase: self._cut.graphs[F if phase is Phase.EVALUATE else phase, stage.index] for phase in stage.programs}
            programs = dict(stage.programs)
            if stage.hoisted is not None:
                graphs[Phase.HOIST], programs[Phase.HOIST] = self._cut.hoisted[stage.index], stage.hoisted
            for phase, item in programs.items():
                rendered = replace(render(graphs[phase].graph), text=item.source)
                yield replace(self._slot(stage.index, phase, graphs[phase].graph, rendered), final=True)

    def _slot(self, stage: int, phase: Phase, graph: fx.Graph, rendered: RenderedGraph) -> _Text:
        name, per = phase.label, "once per step" if phase is Phase.HOIST else "one microbatch"
        return _Text(f"stage{stage}_{name}", f"{self._kind}: stage {stage}, {name}, {per}", graph, rendered)

    def _phase(self, phase: Phase) -> Phase:
        return Phase.EVALUATE if self._kind == "eval" else phase

    def _write(self, file: str, text: str) -> None:
        label = self._kind if self._folder is None else self._folder.name
        aot.trace_artifact(f"graphpp_{label}_{file.replace('/', '_')}", lambda: text)
        if self._folder is not None:
            with _writing(self._folder / file) as path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


def _claim(base: Path, kind: str) -> Path:
    """Make `base/kind`, or `base/kind_2` .. if this process has already written that folder."""
    base = base.absolute()
    with _writing(base):
        if base not in _taken:
            _taken.add(base)
            _remove_earlier(base)
        number = 1
        while (folder := base / (kind if number == 1 else f"{kind}_{number}")) in _taken:
            number += 1
        folder.mkdir(parents=True, exist_ok=True)
    _taken.add(folder)
    return folder


def _remove_earlier(base: Path) -> None:
    """Remove only the files that an earlier process dumped here."""
    for folder in [folder for kind in ("train", "eval") for folder in (base / kind, *base.glob(f"{kind}_[0-9]*"))]:
        for pattern in _OURS:
            for file in folder.glob(pattern):
                file.unlink()
        for emptied in (folder / "programs", folder):
            with suppress(OSError):
                emptied.rmdir()


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    try:
        yield path
    except OSError as fault:
        raise GraphPPError(
            f"the dump cannot be written: {path}: {fault.strerror or fault}. "
            "Give another folder with debug= or GRAPHPP_DUMP, or none."
        ) from fault
