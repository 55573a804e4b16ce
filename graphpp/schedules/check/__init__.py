"""TODO graphpp.schedules.check."""
