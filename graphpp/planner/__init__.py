"""Decides, before anything runs, where stages start, how many microbatches there are, and which values stay in memory.

`resolve_split.py`, `split_by_name.py`, `megatron_layout.py` and `layers.py` place the stages where the caller says;
`auto_split.py` finds the fastest places from the costs of the pieces between them (`segments.py`). `counts.py` and `tables.py`
make the table. `recompute_policy.py` and `offload_policy.py` say which activations are kept. `plan.py` is the decision as data,
`memory_plan.py`, `shard_plan.py` and `layer_plan.py` are its bytes, `search_plans.py` searches the schedule. `cluster_planner/`
prices a model on machines that are not here.
"""
