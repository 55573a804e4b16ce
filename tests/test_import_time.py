"""`import graphpp` loads nothing heavy that `import torch` does not load already; no time is measured.

Compilers, graph libraries and printers are imported by the function that first needs them: see `fake_mode` in
`graphpp/_torch/aot.py`, the minimum cuts in `graphpp/passes/`, and `graphpp/planner/plan.py`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = (
    "filelock",
    "functorch.compile",
    "networkx",
    "rich",
    "sympy",
    "torch._dynamo",
    "torch._functorch._aot_autograd",
    "torch._functorch.aot_autograd",
    "torch._inductor",
    "torch.distributed.pipelining",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch.testing",
    "transformers",
    "triton",
    "typer",
)
PROGRAM = """
import json, sys
import torch
by_torch = set(sys.modules)
import graphpp
by_graphpp = set(sys.modules) - by_torch
graphpp.schedules.check(graphpp.schedules.zbv_zero_bubble(4, 8, 8), ranks=4, stages=8, microbatches=8)
by_table = set(sys.modules) - by_torch - by_graphpp
print(json.dumps([sorted(by_graphpp), sorted(by_table)]))
"""


@pytest.fixture(scope="module")
def loaded() -> list[list[str]]:
    """The modules that `import graphpp` loads beyond `import torch`, and those that a checked table loads beyond both."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("heavy", HEAVY)
def test_neither_the_import_nor_a_table_loads(loaded: list[list[str]], heavy: str) -> None:
    by_graphpp, by_table = loaded
    assert not [name for name in by_graphpp if f"{name}.".startswith(f"{heavy}.")]
    assert not [name for name in by_table if f"{name}.".startswith(f"{heavy}.")]


def test_import_loads_graphpp_itself(loaded: list[list[str]]) -> None:
    """The list is not empty by mistake: the program above did import this checkout."""
    assert {"graphpp", "graphpp.api", "graphpp.capture.trace"} <= set(loaded[0])
