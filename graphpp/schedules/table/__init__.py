"""TODO graphpp.schedules.table."""
