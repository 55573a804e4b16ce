"""The search behind `graphpp.runtime.scheduler`: problem, patterns, decoding, filling, improving, tables."""
