"""The table of a schedule and the plain data around it: actions, rows, stage costs, placement of stages on ranks.

The lowest floor of `graphpp.schedules`: it imports `graphpp.errors` and nothing else of graphpp, and never torch. Nothing
here judges whether a table makes sense; `graphpp.schedules.check` does.
"""
