"""TODO graphpp.parallel."""
