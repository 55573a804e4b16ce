"""Attributes of modules that a forward writes: undone after a trace, then refused or set to eager's values after each step."""
