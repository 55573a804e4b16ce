"""Pictures of schedules and timelines: an SVG chart, a trace for chrome://tracing and Perfetto."""
