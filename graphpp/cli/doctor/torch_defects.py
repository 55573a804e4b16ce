"""Defects of PyTorch that were reproduced, on which versions, and what graphpp does instead.

Contract: `seen` lists the versions on which the defect was reproduced, `gone` the first version on which the same reproduction
failed. About other versions the table says nothing. `test` is the test of graphpp that would fail with the defect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["present", "gone", "not tried"]


@dataclass(frozen=True)
class Defect:
    """One defect of torch: what happens, what graphpp does instead, and where that was seen and is tested."""

    where: str
    what: str
    instead: str
    seen: tuple[str, ...]
    test: str
    gone: str | None = None

    def state(self, version: str) -> State:
        """Whether a version of torch, such as `2.13`, has the defect."""
        if version in self.seen:
            return "present"
        return "gone" if self.gone is not None and _parts(version) >= _parts(self.gone) else "not tried"


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


_PIPELINING = "torch.distributed.pipelining"
_BOTH = ("2.13", "2.15")
_DEFECTS = "tests/end_to_end/test_torch_defects.py::"
_SCHEDULES = "tests/end_to_end/test_every_schedule.py::test_frozen_stages_and_recomputed_blocks_under_zero_bubble"

DEFECTS = (
    Defect(
        _PIPELINING,
        "a manual stage without given shapes runs once on uninitialised memory and spoils the buffers of batch norm",
        "shapes come from the graph, the model never runs to find them",
        ("2.13",),
        f"{_DEFECTS}test_no_run_to_find_shapes_touches_batch_norm",
        gone="2.15",
    ),
    Defect(
        "gloo",
        "an all-gather of a functional collective beside another collective ends the process, now and then, by a double free",
        "each tensor is gathered by a call that is not coalesced",
        _BOTH,
        "tests/parallel/test_gloo_gathers.py::test_gathers_are_those_of_torch",
    ),
    Defect(
        _PIPELINING,
        "under zero bubble a checkpointed block with K weight groups runs forward 2 + K times",
        "the block runs twice",
        _BOTH,
        "tests/end_to_end/test_split_backward.py::test_a_block_runs_forward_twice_however_many_linears_it_has",
    ),
    Defect(
        _PIPELINING,
        "under zero bubble with a frozen first stage the next stage gets no gradients, without a word",
        "the stage gets its gradients",
        _BOTH,
        _SCHEDULES,
    ),
    Defect(
        "DistributedDataParallel",
        "the gradients of a zero-bubble schedule are not averaged over replicas (pytorch#144530)",
        "each stage's gradients are averaged, under every schedule",
        _BOTH,
        "tests/parallel/test_data_parallel.py::test_gradients_are_the_mean_over_the_replicas",
    ),
    Defect(
        _PIPELINING,
        "the tracer makes two parameters of a tied one, without a word",
        "a tied parameter stays one",
        _BOTH,
        f"{_DEFECTS}test_tied_weights_stay_tied",
    ),
    Defect(
        _PIPELINING,
        "schedule files with a doubled backward, a microbatch out of range or a B beside I and W are accepted",
        "every table is checked before the first step",
        _BOTH,
        "tests/end_to_end/test_bad_input.py",
    ),
    Defect(
        _PIPELINING,
        "an evaluation without a target fails if a loss is set",
        "the evaluation returns the outputs",
        _BOTH,
        f"{_DEFECTS}test_evaluation_without_a_target_although_a_loss_is_set",
    ),
    Defect(
        _PIPELINING,
        "dropout differs from that of a run in one process",
        "the random numbers depend on the microbatch alone",
        _BOTH,
        f"{_DEFECTS}test_dropout_is_that_of_one_process",
    ),
    Defect(
        "torch.export",
        "a traced LSTM, GRU or RNN of several layers loses the dropout between them",
        "the layers are traced one by one",
        ("2.11", "2.13", "2.15"),
        "tests/capture/test_stacked_rnn.py::test_every_layer_but_the_last_is_dropped",
    ),
    Defect(
        "torch.export",
        "the backward of a custom autograd.Function is dropped, and its forward is differentiated instead",
        "the function keeps its own backward, or the model is refused",
        ("2.13",),
        "tests/capture/test_autograd_functions.py::test_each_keeps_its_own_backward_bit_for_bit",
    ),
)
