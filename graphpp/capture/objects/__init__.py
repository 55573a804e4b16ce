"""The Python objects that the code of a model and a loss reads: the names in the code, and one walk over the objects."""
