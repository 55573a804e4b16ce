"""From captured graphs to a runner: lower a call for its table, compile its regions, assemble its runner.

`compile_graph.py` captures one microbatch and lowers its stages, `build.py` lowers a whole call, `compile_regions.py` runs the
backend, `assemble.py` makes the runner, `overlap.py` weaves overlapped actions, `buffer_hazards.py` refuses steps whose result
would depend on the schedule, `facts.py` has the lines that ranks compare, `dump.py` writes every step to disk.
"""
