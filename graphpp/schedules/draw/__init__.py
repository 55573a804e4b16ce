"""Pictures of schedules and timelines: an SVG chart, a trace for chrome://tracing and Perfetto.

`pictures` has the functions for users. May import the table and simulate packages of `graphpp.schedules`.
"""
