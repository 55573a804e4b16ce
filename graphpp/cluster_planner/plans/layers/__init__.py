"""Single layers of a setting: those that are recomputed, and those that computations gather one after the other."""
