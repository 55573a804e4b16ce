"""Pictures of schedules and timelines: an SVG chart, a trace for chrome://tracing and Perfetto.

`svg.py` and `chrome_trace.py` have the functions for users; `graphpp.html` is in `report/`.
"""
