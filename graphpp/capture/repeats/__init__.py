"""Capture modules that a model repeats, such as equal layers: trace two calls, copy the graph of the others.

Parts: find the equal modules, let operators stand for their calls in the traces, put copies of a traced call in their place.
"""
