"""TODO graphpp._torch."""
