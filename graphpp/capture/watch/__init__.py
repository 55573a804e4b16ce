"""Detect changes between steps of non-tensor state on which a captured graph depends."""
