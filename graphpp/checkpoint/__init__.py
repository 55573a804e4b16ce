"""Save a training and resume it in any layout.

`training_state.py` and `optimizer_state.py` define names and values. `folder.py` writes a checkpoint that all ranks see,
`local.py` one in the machines' own folders (`find_saves.py`, `machines.py`). `restore.py` and `safe_reading.py` read both.
"""
