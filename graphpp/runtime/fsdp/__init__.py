"""FSDP: each rank of `dp_shard` holds some rows of every parameter of its stages, and gathers whole parameters for their use.

`gather_parameters.py` holds the rows of a stage and gathers its whole parameters. `sharded_parameters.py` makes the `DTensor`
parameters of a rank and finds the flat shards of a stage. `sharded_gradients.py` sums the gradients of all ranks, and leaves
each rank those of its rows. `flat_parameters.py` gives optimizers one plain parameter for many. `precision.py` says in which
dtypes parameters are gathered and gradients are sent. Which rows a rank has, `runtime/dtensors.py` tells.
"""
