"""Capture: model, loss and one example microbatch -> `JointGraph`, by `torch.export` and AOT Autograd's joint trace.

`trace.py` is the entry, `refusals.py` lists refused models. May import batch, passes, runtime and `_torch`. Only the first
capture imports Dynamo.
"""
