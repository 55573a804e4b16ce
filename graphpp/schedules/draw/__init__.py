"""TODO graphpp.schedules.draw."""
