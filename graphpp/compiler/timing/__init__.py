"""Runs of single stage programs, to time them."""
