"""Decides, before anything runs, where stages start, how many microbatches there are, and which values stay in memory.

`resolve_split.py`, `split_by_name.py`, `megatron_layout.py` and `layers.py` place the stages, `counts.py` and `tables.py` make
the table, `recompute_policy.py` and `offload_policy.py` say which activations are kept, `plan.py` is the decision as data.
"""
