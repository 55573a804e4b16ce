"""TODO graphpp.passes.text."""
