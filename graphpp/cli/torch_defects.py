"""Reproduced defects of PyTorch, and how graphpp avoids each.

`seen`: versions with the defect; `gone`: versions on which the same reproduction fails; other versions were not tried. `test`:
the test of graphpp that would fail with the defect.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Defect(NamedTuple):
    where: str
    seen: tuple[str, ...]
    what: str
    instead: str
    test: str
    gone: tuple[str, ...] = ()

    def state(self, version: str) -> Literal["present", "gone", "not tried"]:
        """Whether a version of torch, such as `2.13`, has the defect."""
        return "present" if version in self.seen else "gone" if version in self.gone else "not tried"


_PIPELINING, _BOTH, _TEST = "torch.distributed.pipelining", ("2.13", "2.15"), "tests/end_to_end/test_torch_defects.py::"
DEFECTS = (
    Defect(_PIPELINING, ("2.13",), "a manual stage without given shapes runs on uninitialised memory and spoils batch norm",
           "shapes come from the graph", f"{_TEST}test_no_run_to_find_shapes_touches_batch_norm", gone=("2.15",)),
    Defect("gloo", _BOTH, "an all-gather of a functional collective beside another one may end the process by a double free",
           "gathers are not coalesced", "tests/parallel/test_gloo_gathers.py::test_gathers_are_those_of_torch"),
    Defect(_PIPELINING, _BOTH, "under zero bubble a checkpointed block with K weight groups runs forward 2 + K times", "twice",
           "tests/end_to_end/test_split_backward.py::test_a_block_runs_forward_twice_however_many_linears_it_has"),
    Defect(_PIPELINING, _BOTH, "under zero bubble the stage behind a frozen first one silently gets no gradients", "it does",
           "tests/end_to_end/test_every_schedule.py::test_frozen_stages_and_recomputed_blocks_under_zero_bubble"),
    Defect("DistributedDataParallel", _BOTH, "zero-bubble gradients are not averaged over replicas (pytorch#144530)",
           "they are averaged", "tests/parallel/test_data_parallel.py::test_gradients_are_the_mean_over_the_replicas"),
    Defect(_PIPELINING, _BOTH, "the tracer silently makes two parameters of a tied one", "a tied parameter stays one",
           f"{_TEST}test_a_rank_that_uses_a_tied_parameter_in_two_stages_holds_it_once"),
    Defect(_PIPELINING, _BOTH, "schedule files with a doubled backward, a wrong microbatch, or a B beside I and W are accepted",
           "every table is checked before the first step", "tests/end_to_end/test_bad_input.py"),
    Defect(_PIPELINING, _BOTH, "an evaluation without a target fails if a loss is set", "the evaluation returns the outputs",
           "tests/pipeline/test_eval.py::test_evaluation_is_that_of_eager"),
    Defect(_PIPELINING, _BOTH, "dropout differs from that of a run in one process", "the microbatch decides random numbers",
           f"{_TEST}test_dropout_is_that_of_one_process"),
    Defect("torch.export", ("2.11", *_BOTH), "a traced LSTM, GRU or RNN of several layers loses the dropout between them",
           "layers are traced one by one", "tests/capture/test_stacked_rnn.py::test_every_layer_but_the_last_is_dropped"),
    Defect("torch.export", ("2.13",), "a custom autograd.Function loses its backward; its forward is differentiated instead",
           "the function keeps its own backward, or the model is refused",
           "tests/capture/test_autograd_functions.py::test_each_keeps_its_own_backward_bit_for_bit"),
)  # fmt: skip
