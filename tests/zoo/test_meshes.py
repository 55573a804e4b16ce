"""Models of transformers on meshes, with the tensor-parallel plan that they bring along, train like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphpp
from graphpp.errors import CaptureError
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh
from tests.zoo.on_meshes import Case, Trained, language_model, loss, spread_by_transformers, train_alone, train_on_mesh

PIPE, SHARDS, TENSOR = Mesh((2,), ("pp",)), Mesh((2,), ("dp_shard",)), Mesh((2,), ("tp",))
PIPE_SHARDS, PIPE_TENSOR = Mesh((2, 2), ("pp", "dp_shard")), Mesh((2, 2), ("pp", "tp"))
SHARDS_TENSOR, PIPE_CONTEXT = Mesh((2, 2), ("dp_shard", "tp")), Mesh((2, 2), ("pp", "cp"))
REPLICAS_OF_ALL = Mesh((2, 2, 2), ("pp", "dp_replicate", "tp"))
EVERYTHING = Mesh((2, 2, 2), ("pp", "dp_shard", "tp"))
TOLERANCE = 1e-6  # relative, in the 2-norm, of each parameter after the last step


def run(schedule: str, stages: int, keep: int | None = None, **more: Any) -> Case:
    return Case({"schedule": schedule, "split": stages, "parallel": graphpp.Parallel(keep=keep)}, **more)


SCHEDULES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "LoopedBFS": 4, "ZBVZeroBubble": 4, "DualPipeV": 4}
EVERY_SCHEDULE = tuple(run(name, stages) for name, stages in SCHEDULES.items())
KEEPING_ONE = tuple(run(name, stages, keep=1) for name, stages in SCHEDULES.items() if name != "DualPipeV")  # it overlaps two
LOOPS = (run("auto", 1), run("auto", 1, by="torch"), run("LoopedBFS", 4, keep=1))


def together(parts: list[Trained]) -> Trained:
    """All ranks' parameters; those that several ranks return are equal bit for bit, and so are norms."""
    whole = Trained(parts[0].norms)
    for part in parts:
        assert part.norms == whole.norms
        assert all(torch.equal(whole.params.setdefault(fqn, value), value) for fqn, value in part.params.items())
    return whole


def relative_errors(found: Trained, expected: Trained) -> dict[str, float]:
    pairs = {fqn: (value, expected.params[fqn]) for fqn, value in found.params.items()}
    pairs |= {f"norm {step}": pair for step, pair in enumerate(zip(found.norms, expected.norms, strict=True))}
    return {name: ((mine - theirs).norm() / theirs.norm()).item() for name, (mine, theirs) in pairs.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        (PIPE_TENSOR, (run("1F1B", 2, model="qwen3", by="heads"),)),
        *further(
            (PIPE_TENSOR, (run("Interleaved1F1B", 4),)),
            (PIPE_CONTEXT, (run("ZBVZeroBubble", 4),)),
            (EVERYTHING, (run("1F1B", 2, keep=0, optimizer="adamw"),)),
            (EVERYTHING, (run("Interleaved1F1B", 4, keep=1),)),
            (PIPE, EVERY_SCHEDULE),
            (SHARDS, (run("auto", 1), run("LoopedBFS", 4, keep=1), run("Interleaved1F1B", 4, keep=2))),
            (TENSOR, LOOPS[:2]),
            (PIPE_TENSOR, (*EVERY_SCHEDULE, run("1F1B", 2, by="torch"))),
            (PIPE_TENSOR, (run("ZBVZeroBubble", 4, model="qwen3", by="torch"), run("DualPipeV", 4, model="qwen3", by="heads"))),
            (PIPE_TENSOR, (run("1F1B", 2, model="mixtral"), run("LoopedBFS", 4, model="mixtral"))),
            (SHARDS_TENSOR, (run("Interleaved1F1B", 4, keep=1, model="mixtral"),)),
            (PIPE_SHARDS, EVERY_SCHEDULE + KEEPING_ONE),
            (PIPE_SHARDS, tuple(run(name, stages, keep=0) for name, stages in SCHEDULES.items())),
            (PIPE_SHARDS, tuple(run(name, stages, optimizer="adamw") for name, stages in SCHEDULES.items())),
            (PIPE_TENSOR, tuple(run(name, stages, optimizer="adamw") for name, stages in SCHEDULES.items())),
            (SHARDS_TENSOR, (run("auto", 1, keep=0, optimizer="adamw"), run("LoopedBFS", 4, keep=1, optimizer="adamw"))),
            (SHARDS_TENSOR, LOOPS),
            (PIPE_CONTEXT, EVERY_SCHEDULE),
            (EVERYTHING, (*EVERY_SCHEDULE, run("LoopedBFS", 4, keep=1, by="torch"))),
            (REPLICAS_OF_ALL, EVERY_SCHEDULE),
        ),
    ],
    ids=lambda value: " x ".join(value.names) if isinstance(value, Mesh) else "",
)
def test_a_training_is_that_of_one_process(mesh: Mesh, cases: tuple[Case, ...]) -> None:
    parts = run_ranks(train_on_mesh, mesh.ranks, mesh, cases)
    first: dict[str, Trained] = {}
    for at, case in enumerate(cases):
        found = together([each[at] for each in parts])
        expected = train_alone(mesh.replicas // mesh.size("cp"), case.model, case.optimizer)
        assert found.params.keys() == expected.params.keys()
        assert {name: error for name, error in relative_errors(found, expected).items() if error > TOLERANCE} == {}, case
        if case.options["parallel"].keep is None:  # a smaller `keep` cuts the sums over the microbatches
            same = first.setdefault(f"{case.model} {case.optimizer}", found)
            assert all(torch.equal(same.params[fqn], value) for fqn, value in found.params.items()), case


def refused(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = TENSOR.made()
    model, tokens = language_model("qwen3"), torch.full((4, 8), 5)
    spread_by_transformers(model, mesh["tp"])
    with pytest.raises(CaptureError, match=r"grad_hook at .*tensor_parallel.py:.*SequenceParallel\(sequence_dim"):
        graphpp.compile(model, loss, mesh=mesh, microbatches=2).step(input_ids=tokens, target=tokens)


@pytest.mark.exhaustive
def test_hooks_that_a_plan_sets_in_the_forward_are_refused_with_the_style_to_take() -> None:
    run_ranks(refused, 2)
