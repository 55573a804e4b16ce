"""Sizes that are no constants of a graph: sizes that vary between microbatches, and data-dependent sizes."""
