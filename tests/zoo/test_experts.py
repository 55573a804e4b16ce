"""Mixtures of transformers train on other ranks of experts than of attention as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh
from tests.zoo.experts_on_meshes import train_alone, train_on_meshes
from tests.zoo.test_meshes import relative_errors, together

SHARDED, OVER_SHARDS = Mesh((2, 2, 2), ("pp", "dp_shard", "tp")), Mesh((2, 1, 4), ("pp", "dp_shard", "ep"))

TOLERANCE = 3e-6  # relative, in the 2-norm, after three steps of AdamW


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "mesh", "experts", "options"),
    [
        ("mixtral", Mesh((2, 2), ("pp", "tp")), Mesh((2, 2), ("pp", "ep")), {"split": 2, "schedule": "1F1B"}),
        *further(
            ("mixtral", Mesh((2, 2), ("dp_shard", "cp")), Mesh((1, 4), ("dp_shard", "ep")), {}),
            ("deepseek_v3", Mesh((2, 2), ("dp_shard", "tp")), Mesh((1, 4), ("dp_shard", "ep")), {"parallel": {"keep": 0}}),
            ("deepseek_v3", Mesh((2, 2), ("pp", "cp")), Mesh((2, 2), ("pp", "ep")), {"split": 4, "schedule": "ZBVZeroBubble"}),
            ("deepseek_v3", SHARDED, OVER_SHARDS, {"split": 4, "schedule": "Interleaved1F1B"}),
            ("mixtral", SHARDED, OVER_SHARDS, {"split": 4, "schedule": "DualPipeV"}),
        ),
    ],
)
def test_a_training_is_that_of_one_process(name: str, mesh: Mesh, experts: Mesh, options: dict[str, Any]) -> None:
    found = together(run_ranks(train_on_meshes, mesh.ranks, name, mesh, experts, options))
    expected = train_alone(name, mesh.replicas // mesh.size("cp"))
    assert found.params.keys() == expected.params.keys()
    errors = relative_errors(found, expected)
    assert {fqn: error for fqn, error in errors.items() if error > TOLERANCE} == {}
