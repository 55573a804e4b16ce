"""Backends: Inductor or the caller's function compiles regions of operations, CUDA graphs replay whole stage programs.

`inductor.py` compiles, `region_results.py` checks the compiled results, `graphpp/cache` keeps them for other ranks and runs,
`gemm_kernels.py` measures kernels of matrix products, `cuda_graphs.py` and `record_programs.py` record and replay. May import
options, passes, runtime and `_torch`.
"""
