"""The table of a schedule: actions, rows, costs, placement. `graphpp.schedules.check` judges whether a table makes sense."""
