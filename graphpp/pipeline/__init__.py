"""`Pipeline`, which `graphpp.compile` returns, and the graphs and runners that it keeps.

`pipeline.py` is the public face, `rank_part.py` its half for the parameters of a rank (`ownership/`, `checkpoint/`),
`module_habits.py` refuses names that it does not have, `graph_cache.py` prepares calls,
`profile.py` and `profile_steps.py` measure steps, `grad_norm.py` clips gradients over all ranks.
"""
