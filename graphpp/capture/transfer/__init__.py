"""A captured graph in another process: the graph as data, and whether the other process has the same model and loss.

`write_graph.py` and `read_graph.py` are the entries; `format.py` has their contract. `digest.py` compares model and loss, and
names their tensors and process groups.
"""
