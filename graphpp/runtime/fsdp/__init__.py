"""FSDP: each rank of `dp_shard` has some rows of every parameter of its stages, and gathers whole parameters for their use.

`gather_parameters.py` has the rows of a stage and gathers its whole parameters; `sharded_parameters.py` makes a rank's
`DTensor` parameters; `sharded_gradients.py` reduces gradients to each rank's rows. `runtime/dtensors.py` defines the rows.
"""
