"""A newcomer's first minute: tests of one process that touch every package. `make quick`, or `python -m tests.quick`.

`QUICK` has beginnings of test ids. `tests/conftest.py` gives these tests the mark `quick`, and `tests/test_floors.py` checks
that every package has some. Only their files are collected, since collecting all files imports every model library.
"""

import sys

import pytest

QUICK = (
    "tests/backends/test_region_strides.py::test_the_turned_kernel_breaks_its_promise",
    "tests/batch/test_loss_weights.py::test_what_is_no_number_is_refused",
    "tests/cache/test_cache.py::test_the_entries_used_longest_ago_go_first",
    "tests/capture/test_source_lines.py",
    "tests/capture/test_trace.py",
    "tests/checkpoint/test_folder.py::test_a_missing_folder",
    "tests/cli/test_command.py",
    "tests/cluster_planner/plans/test_mesh_shapes.py",
    "tests/compiler/test_dump.py::test_golden",
    "tests/devices/test_devices.py",
    "tests/options/test_options.py",
    "tests/ownership/test_export.py::test_an_entry_that_is_no_tensor_is_refused",
    "tests/parallel/test_place.py::test_one_process_has_no_group",
    "tests/passes/forward/test_causal_attention.py::test_a_formula_gives_every_element",
    "tests/passes/graph/test_liveness.py",
    "tests/passes/joint/test_clean_up.py",
    "tests/passes/overlap/test_weave.py::test_random_parts[0]",
    "tests/passes/recompute/test_min_cut.py",
    "tests/passes/stage/test_cut_stages.py",
    "tests/passes/text/test_render.py",
    "tests/pipeline/test_state.py::test_a_meta_model_is_captured_cut_and_printed_without_memory",
    "tests/planner/test_resolve_split.py",
    "tests/report/test_page_html.py",
    "tests/runtime/gradients/test_accumulate.py::test_any_order_gives_the_sum_in_order",
    "tests/schedules/check/test_shard_order.py",
    "tests/schedules/draw/test_pictures.py",
    "tests/schedules/generate/test_combined_1f1b.py",
    "tests/schedules/rewrite/test_add_idle_cells.py",
    "tests/schedules/search/test_scheduler.py::test_unit_costs[V-Half",
    "tests/schedules/simulate/test_simulator.py",
    "tests/schedules/table/test_actions.py",
    "tests/test_floors.py",
    "tests/verification/test_verify.py::test_wrong_arguments_are_refused_by_name",
)

if __name__ == "__main__":
    files = sorted({each.partition("::")[0] for each in QUICK})
    raise SystemExit(pytest.main(["-q", "-m", "quick", *sys.argv[1:], *files]))
