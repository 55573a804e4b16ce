"""TODO graphpp.schedules.generate."""
