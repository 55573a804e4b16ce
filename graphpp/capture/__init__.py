"""TODO graphpp.capture.trace."""
