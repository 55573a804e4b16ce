"""`Pipeline`, which `graphpp.compile` returns, and the graphs and runners that it keeps.

`pipeline.py` is the public face, `rank_part.py` its half for the parameters of a rank (`ownership/`, `checkpoint/`);
`module_habits.py` refuses names that it does not have. `read_batch.py` cuts a batch, `calls.py` agrees on a call, prepares and
runs it, `graph_cache.py` keeps its graphs and runner under the keys of `cache_key.py`. `profile.py` and `profile_steps.py`
measure steps, `grad_norm.py` clips gradients over all ranks.
"""
