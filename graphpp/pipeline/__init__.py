"""`Pipeline`, which `graphpp.compile` returns, and the graphs and runners that it keeps.

`pipeline.py` is the public class, and `rank_part.py` its base for a rank's parameters (`ownership/`, `checkpoint/`).
`calls.py` agrees on a call, prepares and runs it; `graph_cache.py` keeps its graphs and runner.
"""
