"""Each rank owns its part of the model: allocate and fill parameters, gather and export the whole model.

`ownership.py` decides which rank owns which tensor. `materialize.py` allocates and fills this rank's part, from initialising
code (`initialize.py`, with `lent_memory.py` and `unwritten.py`) or from files (`weight_files.py`). `initial_values.py` compares
initial values between ranks. `export.py` gathers the whole model or writes it as safetensors.
"""
