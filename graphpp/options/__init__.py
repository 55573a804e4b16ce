"""Every option of `graphpp.compile`: `options.py` has the list, the other files the groups and readers.

This package knows no graphs: `planner/` turns options into operations of a graph, `backends/` has the compilers.
"""
