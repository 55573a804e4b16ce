"""Each rank owns its part of the model: give parameters memory and values, gather and export the whole.

`ownership.py` says which rank holds which tensor. `materialize.py` gives this rank's part memory and values, on all ranks or on
none: by the code that initialises a model (`initialize.py`, with `lent_memory.py` for other ranks' tensors and marks of
`unwritten.py`), or from files (`weight_files.py`). `initial_values.py` compares the values with which ranks begin. `export.py`
sends the whole model to one rank, or writes it as safetensors.
"""
