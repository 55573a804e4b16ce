"""Refusals of graphs with which a step would compute wrong numbers.

`buffer_hazards.py` refuses values that would depend on the order of a table, `gathered_experts.py` experts whose gradients
would lack the rows of other ranks.
"""
