"""Each rank owns its part of the model: give parameters memory and values, gather and export the whole.

`ownership.py` says which rank holds which tensor, `stale_copies.py` refuses copies that another pipeline has left behind.
`initialize.py` runs the code that initialises a model where this rank has memory for a part of it, `weight_files.py` reads this
rank's part of a checkpoint on disk, `materialize.py` does either on all ranks or on none. `gather.py` sends the whole model to
one rank, `export.py` writes it as safetensors.
"""
