"""Graphs as Python text: the text that runs, and the same text as a file that runs without graphpp."""
