"""Capture models whose parameters are `DTensor`s: layers that `parallelize_module` has spread over ranks.

`torch.export` loses the gradients of such parameters, so AOT Autograd traces model and loss themselves (`direct_trace.py`).
Modules read their local shards as `DTensor`s (`local_shards.py`), and calls of modules are noted (`module_stacks.py`).
"""
