"""Attributes of modules that a forward writes: undone after a trace, refused, or given eager's values after each step.

`writes.py` records and undoes the writes. `decide.py` proves that every call of the forward has the graph of the first one,
also where a number in an attribute changes; all other models are refused.
"""
