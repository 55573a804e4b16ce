"""TODO graphpp.schedules.rewrite."""
