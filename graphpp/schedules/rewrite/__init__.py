"""Rewrites: one file per function from a table to a table. A rewrite keeps every guarantee of `graphpp.schedules.check`."""
