"""The report page of a pipeline: its data, from what was compiled, profiled and trained so far."""
