"""A captured graph in another process: the graph as data, and whether the other process has the same model and loss.

`write_graph.py` and `read_graph.py` are the entries; `format.py` has their contract. `reachable.py` walks over model and loss,
for a digest of them and for the names of their tensors and process groups.
"""
