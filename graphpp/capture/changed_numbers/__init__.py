"""Numbers in attributes that a forward changes: which of them a captured graph may ignore, and their values after a step.

`decide.py` proves that every call of the forward has the graph of the first one; all other models are refused.
"""
