"""Graph to graph: one idea, one file, named after the idea. `lower.py` lists them in order."""
