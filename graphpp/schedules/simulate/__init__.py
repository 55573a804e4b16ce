"""TODO graphpp.schedules.simulate."""
