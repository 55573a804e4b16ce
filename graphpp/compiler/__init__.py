"""From captured graphs to a runner: lower a call for its table, compile its regions, assemble its runner.

`compile_graph.py` lowers one captured graph, cut at `stage_starts.py`, in the phases of `program_variants.py`. `held_state.py`
counts the bytes of model state. `build.py` lowers a whole call, `overlap.py` orders operations to hide collectives,
`compile_regions.py` runs the backend, `assemble.py` makes the runner. `facts.py` has the lines that ranks compare.
`exchanged_values.py` refuses values that would differ between ranks. `dumps/` writes each step to disk.
"""
