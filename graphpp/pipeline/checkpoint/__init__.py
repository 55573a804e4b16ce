"""Save and load a training: parameters, buffers, optimizers and all else by name, for any other layout of ranks and stages.

`training_state.py` lists the contents of a checkpoint, `folder.py` writes and reads it with torch's distributed checkpoint.
"""
