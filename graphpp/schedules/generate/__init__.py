"""Generators: functions from (ranks, stages, microbatches) to a table, and the reader of the `schedule=` option.

To add a schedule, write its generator in the file of its family and enter it in `names.SCHEDULES`. May import the table,
check and rewrite packages of `graphpp.schedules`.
"""
