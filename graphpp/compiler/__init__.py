"""From captured graphs to a runner: lower a call for its table, compile its regions, assemble its runner.

`compile_graph.py` lowers the stages of one captured graph, which start where `stage_starts.py` says and have the phases of
`program_variants.py`. `held_state.py` counts the bytes of the model's state. `build.py` lowers a whole call.
`compile_regions.py` runs the backend, `assemble.py` makes the runner, `overlap.py` weaves overlapped actions. `facts.py` has
the lines that ranks compare. `exchanged_values.py` refuses values that would differ between ranks. `dumps/` writes each step
to disk.
"""
