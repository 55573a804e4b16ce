"""Refusals of graphs with which a step would compute wrong numbers.

`buffer_hazards.py` refuses values that would depend on the order of a table, `exchanged_values.py` values that would differ
between ranks and must not.
"""
