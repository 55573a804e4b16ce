"""Backends: Inductor or the caller's function compiles regions of operations, CUDA graphs replay whole stage programs.

`choose_backend.py` has the compiler of each `backend=` option, `inductor.py` compiles, `region_results.py` checks the compiled
results, `regions.py` compiles each region once. `kernels.py` chooses kernels by measurement; no other package knows of the
choice. `cuda_graphs.py` and `record_programs.py` record and replay.
"""
