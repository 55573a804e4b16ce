"""Attributes of modules that a forward writes: undone after a trace, refused, or given eager's values after each step.

`writes.py` records and undoes the writes. `second_call.py` accepts a forward that changes numbers if a second call has the
same graph and leaves the same numbers; all other models are refused.
"""
