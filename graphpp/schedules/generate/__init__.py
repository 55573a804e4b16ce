"""Generators: functions from (ranks, stages, microbatches) to a table, and the reader of the `schedule=` option."""
