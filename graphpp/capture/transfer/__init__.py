"""Transfer of a captured graph: `write_graph.py` and `read_graph.py` serialize it, `digest.py` compares models of processes."""
