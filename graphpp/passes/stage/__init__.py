"""TODO graphpp.passes.stage."""
