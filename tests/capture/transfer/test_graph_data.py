"""A captured graph that is written and read again: the same nodes, metadata, stage programs and texts."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import CapturedGraph, capture
from graphpp.capture.transfer.digest import ModelDigest
from graphpp.capture.transfer.read_graph import read_graph
from graphpp.capture.transfer.write_graph import WriteError, write_graph
from graphpp.passes.lower import LoweringOptions, lower
from graphpp.planner.layers import module_calls
from tests.exhaustive import examples, further
from tests.fuzz.programs import Net, Program, programs
from tests.training import CASES
from tests.zoo.models import ZOO

CPU = torch.device("cpu")
META = ("val", "backward", "position", "calls", "source", "seq", "checkpoint", "kept", "role", "roles")


def read_again(captured: CapturedGraph, model: nn.Module, loss: Any) -> CapturedGraph:
    """The graph that another process with the same model reads."""
    held = ModelDigest(model, loss)
    return read_graph(write_graph(captured, CPU, held), CPU, held)


def shown(value: Any) -> Any:
    """A value of a node: everything about a tensor that can be compared."""
    if isinstance(value, Tensor):
        flags = (value.requires_grad, value.is_conj(), isinstance(value, nn.Parameter))
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, flags
    return tuple(map(shown, value)) if isinstance(value, list | tuple) else value


def nodes(captured: CapturedGraph) -> list[tuple[Any, ...]]:
    """The nodes of a graph with their arguments and metadata."""
    found = []
    for node in captured.joint.graph.nodes:
        meta = {key: shown(node.meta[key]) if key == "val" else node.meta[key] for key in META if key in node.meta}
        arguments = str(node.args), str(node.kwargs), [type(each) for each in node.args]
        found.append((node.op, node.name, str(node.target), arguments, sorted(map(str, node.users)), meta))
    return found


def texts(captured: CapturedGraph, split_backward: bool) -> list[str]:
    """The texts of the stage programs of a cut into two stages."""
    calls = module_calls(captured.joint)
    starts = (0, calls[len(calls) // 2].position) if len(calls) > 1 else (0,)
    stages = lower(captured.joint, starts, options=LoweringOptions(split_backward=split_backward)).stages
    return [item.source for stage in stages for item in stage.programs.values()]


def check(model: nn.Module, loss: Any, example: Microbatch, *, training: bool = True) -> None:
    """Write and read the model's graph; both graphs are equal and make the same programs."""
    captured = capture(model, loss, example, CPU, training=training)
    again = read_again(captured, model, loss)
    for mine, theirs in zip(nodes(captured), nodes(again), strict=True):
        assert mine == theirs
    assert (again.joint.parameters, again.joint.buffers) == (captured.joint.parameters, captured.joint.buffers)
    assert list(again.joint.parameters) == list(captured.joint.parameters)
    assert list(again.joint.constants) == list(captured.joint.constants)
    for name, constant in captured.joint.constants.items():
        assert torch.equal(constant, again.joint.constants[name])
        assert constant.stride() == again.joint.constants[name].stride()
    assert (again.output_spec, again.output_leaves) == (captured.output_spec, captured.output_leaves)
    if training:
        assert texts(again, split_backward=True) == texts(captured, split_backward=True)


@pytest.mark.parametrize("name", ["tied", "masked", "several", *further("hf_gpt2", "hf_vit")])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_read_as_written(name: str, training: bool) -> None:
    case = CASES[name](0)
    example = Microbatch(*case.batch.microbatches(4)[0])
    check(case.model, case.loss, example, training=training)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of transformers, asked by peft
@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_read_as_written(name: str) -> None:
    entry = ZOO[name]
    example = Microbatch(*entry.batch(0).microbatches(4)[0])
    check(entry.model(), entry.loss, example)
    check(entry.model().eval(), entry.loss, example, training=False)


@settings(max_examples=examples(25), database=None, phases={Phase.generate}, suppress_health_check=list(HealthCheck))
@given(programs())
def test_random_programs_are_read_as_written(program: Program) -> None:
    net = Net(program)
    check(net, net.loss(), net.batch(1)[0])


class WrittenDown(nn.Module):
    """A forward that makes a tensor anew in each call, from numbers in its code or in memory that others can write to."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.make()


ARRAY = np.arange(4, dtype=np.float32)
HELD_BY_A_LIBRARY = torch.ones(4)
EXAMPLE = Microbatch((torch.ones(2, 4),), {}, torch.ones(2, 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda: torch.as_tensor([1.0, 2.0, 3.0, 4.0]),
        lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t().reshape(-1),
        lambda: torch.tensor([]).sum() + torch.tensor(2, dtype=torch.int8),
        lambda: torch.tensor([1.0, 2.0], dtype=torch.complex64).imag.repeat(2),
    ],
)
def test_numbers_that_code_writes_down_are_written(make: Callable[[], Tensor]) -> None:
    check(WrittenDown(make), nn.functional.mse_loss, EXAMPLE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: string.held,  # type: ignore[attr-defined]
        lambda: torch.asarray(string.held),  # type: ignore[attr-defined]
        lambda: torch.from_numpy(ARRAY),
        lambda: torch.as_tensor(ARRAY),
        lambda: torch.from_dlpack(ARRAY),
    ],
)
def test_a_tensor_that_others_may_change_is_not_written_by_value(
    make: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(string, "held", HELD_BY_A_LIBRARY, raising=False)  # the walk does not enter the standard library
    model = WrittenDown(make)
    captured = capture(model, nn.functional.mse_loss, EXAMPLE, CPU, training=True)
    with pytest.raises(WriteError, match=r"a tensor without a name, read at .*test_graph_data.py:\d+"):
        write_graph(captured, CPU, ModelDigest(model, nn.functional.mse_loss))
