"""TODO graphpp.backends."""
