"""The modules that graphpp loads, and when; no time is measured.

`import graphpp`, help pages and schedules load no torch. All public names together load nothing heavy that `import torch` does
not load already.

Compilers, graph libraries and printers are imported by the function that first needs them: see `fake_mode` in
`graphpp/_torch/aot.py`, the minimum cuts in `graphpp/passes/`, and `graphpp/planner/plan.py`.
"""

import ast
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import graphpp

ROOT = Path(__file__).parents[1]
HEAVY = (
    "filelock.", "functorch.compile.", "networkx.", "rich.", "sympy.", "torch._dynamo.",
    "torch._functorch._aot_autograd.", "torch._functorch.aot_autograd.", "torch._inductor.",
    "torch.distributed.pipelining.", "torch.export._trace.", "torch.fx.experimental.symbolic_shapes.", "torch.testing.",
    "transformers.", "triton.", "typer.",
)  # fmt: skip
PROGRAM = """
import json, sys
import torch
by_torch = set(sys.modules)
import graphpp
for name in graphpp.__all__:
    getattr(graphpp, name)
by_graphpp = set(sys.modules) - by_torch
graphpp.schedules.check(graphpp.schedules.zbv_zero_bubble(4, 8, 8), ranks=4, stages=8, microbatches=8)
by_table = set(sys.modules) - by_torch - by_graphpp
print(json.dumps([sorted(by_graphpp), sorted(by_table)]))
"""


def test_neither_the_names_nor_a_table_loads_what_is_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    by_graphpp, by_table = json.loads(done.stdout)
    assert [name for name in (*by_graphpp, *by_table) if f"{name}.".startswith(HEAVY)] == []
    assert {"graphpp", "graphpp.api", "graphpp.capture.trace"} <= set(by_graphpp), "the program imports another checkout"


COMMANDS = ("--help", "plan --help", "schedule show 1F1B --ranks 2 --microbatches 4")
WITHOUT_TORCH = (
    "import graphpp",
    "import graphpp; graphpp.schedules.check(graphpp.schedules.gpipe(2, 2, 2), ranks=2, stages=2, microbatches=2)",
    "import graphpp; graphpp.ScheduleError; graphpp.devices.Machines.read('8xH100')",
    *(f"import sys; sys.argv[1:] = {each.split()}; import graphpp.cli.app as app; app.main()" for each in COMMANDS),
)


@pytest.mark.parametrize("program", WITHOUT_TORCH)
def test_these_load_no_torch(program: str) -> None:
    watched = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, 'graphpp' in sys.modules)); {program}"
    done = subprocess.run([sys.executable, "-c", watched], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False True"


def test_every_public_name_is_listed_and_found() -> None:
    assert set(graphpp.__all__) <= set(dir(graphpp))
    found = {name: getattr(graphpp, name) for name in graphpp.__all__}
    assert all(found[name] is getattr(graphpp, name) for name in found)
    home = {name: value.__module__ for name, value in found.items() if hasattr(value, "__qualname__")}
    assert all(module.startswith("graphpp.") for module in home.values())
    assert pickle.loads(pickle.dumps([found["Memory"], found["plan"]])) == [graphpp.Memory, graphpp.plan]


def test_type_checkers_and_python_find_a_name_in_one_place() -> None:
    """What `TYPE_CHECKING` imports is what `__getattr__` loads."""
    source = ast.parse(Path(graphpp.__file__).read_text(encoding="utf-8"))
    imports = [each for each in ast.walk(source) if isinstance(each, ast.ImportFrom) and str(each.module).startswith("graphpp")]
    typed = {name.name: each.module for each in imports for name in each.names}
    assert sorted(typed) == sorted(graphpp.__all__)
    for name, module in typed.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(graphpp, name)


@pytest.mark.parametrize("name", ["complie", "planner_of", "_private", "import_module_of"])
def test_other_names_are_no_attributes(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'graphpp' has no attribute '{name}'"):
        getattr(graphpp, name)
