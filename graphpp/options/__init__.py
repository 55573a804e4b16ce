"""Every option of `graphpp.compile`, declared once: `options.py` has the list, a file each has the groups and the readers.

The package knows the types of schedules and of `runtime/program.py`, and no graph. Policies that turn an option into
operations of a graph stand in `planner/`, compilers in `backends/`.
"""
