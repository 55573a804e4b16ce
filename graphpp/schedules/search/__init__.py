"""The search behind `graphpp.schedules.search.scheduler`: problem, patterns, decoding, filling, improving, tables."""
