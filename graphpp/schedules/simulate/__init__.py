"""Simulation: the timeline and the memory of one step of a table, computed from the costs of its stages."""
