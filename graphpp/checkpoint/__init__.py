"""Save a training and resume it in any layout.

`training_state.py` has names and values, `optimizer_state.py` those of optimizers. `folder.py` writes a checkpoint that all
ranks see, `local.py` one in the machines' own folders, with `find_saves.py` and `machines.py`. `restore.py` and
`safe_reading.py` read both; `background.py` is for saves while the training goes on.
"""
