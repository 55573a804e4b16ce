"""Capture tensor parallel models: `parallelize_module` has spread their parameters over ranks, as `DTensor`s.

`torch.export` loses the gradients of such parameters, so AOT Autograd traces model and loss themselves (`direct_trace.py`).
Modules read their local shards as `DTensor`s (`local_shards.py`). `check_meshes.py` refuses other meshes than that of `mesh=`.
"""
