"""The table of a schedule and the plain data around it: actions, rows, stage costs, placement of stages on ranks.

The lowest floor of `graphpp.schedules`. Nothing here judges whether a table makes sense; `graphpp.schedules.check` does.
"""
