"""Decide, before anything runs, where stages start, how many microbatches there are, and which values stay in memory.

`resolve_split.py`, `split_by_name.py`, `megatron_layout.py` and `layers.py` place the stages as the caller says;
`auto_split.py` finds the fastest places from segment costs (`segments.py`). `tables.py` makes the schedule table.
`recompute_policy.py` and `offload_windows.py` choose the activations to keep. `plan.py` is the decision as data;
`memory_plan.py` and `shard_plan.py` are its bytes. `cluster_planner/` prices a model on machines that need not exist.
"""
