"""Capture a graph that serves several sizes of microbatches, and prove it on the traced ones."""
