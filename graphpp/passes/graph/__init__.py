"""TODO graphpp.passes.graph."""
