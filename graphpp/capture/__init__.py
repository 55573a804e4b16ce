"""Capture: model, loss and one example microbatch -> `JointGraph`, by `torch.export` and AOT Autograd's joint trace.

`trace.py` is the entry and lists the steps in order; `refusals.py` lists the models that are refused. Every other file
handles one feature of models (checkpoints, custom autograd Functions, recurrent layers, ..) or one side of the graph (roles).
`watch/` detects changes that need another capture. May import batch, passes, runtime and `_torch`. Importing it loads no
Dynamo; the first capture does.
"""
