"""TODO graphpp.options."""
