"""TODO graphpp.verification."""
