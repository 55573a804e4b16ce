"""TODO graphpp.planner."""
