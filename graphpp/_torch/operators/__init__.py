"""Operators of graphpp for graphs, each with a backward of its own."""
