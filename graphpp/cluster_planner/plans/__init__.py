"""`graphpp.plan`: the search for the fastest way to train a model, on machines that need not be there or by measured costs.

`find.py` is the search; `mesh_shapes.py` and `settings.py` list the ways, `predict_step.py` has the seconds and bytes of one.
`measured.py` searches with measured costs. `training_plan.py` and `found_plans.py` are the result.
"""
