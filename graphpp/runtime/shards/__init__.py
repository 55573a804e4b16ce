"""Sharded parameters: each rank of `dp_shard` holds some rows of every parameter of its stages.

`local_rows.py` tells which rows a rank has of a sharded tensor. `flat_shard.py` holds the rows of a stage and gathers its whole
parameters. `sharded_parameters.py` makes the `DTensor` parameters of a rank and finds the flat shards of a stage.
`sharded_gradients.py` sums the gradients of all ranks, and leaves each rank those of its rows.
`precision.py` says in which dtypes parameters are gathered and gradients are sent.
"""
