"""Sizes that are no constants of a graph: those that vary between microbatches, and those that only the data decides."""
