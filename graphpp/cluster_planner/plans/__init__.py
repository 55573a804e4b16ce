"""The search for the fastest way to train a model on machines that need not be there.

`find.py` is the search; `mesh_shapes.py` and `settings.py` list the ways, `predict.py` has the seconds and bytes of one,
`training_plan.py` is the result.
"""
