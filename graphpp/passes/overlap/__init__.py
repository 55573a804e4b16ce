"""TODO graphpp.passes.overlap."""
