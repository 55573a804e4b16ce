"""`graphpp.plan`: search the fastest way to train a model, on machines that need not exist or by measured costs.

`find.py` is the search; `mesh_shapes.py` and `settings.py` list the settings, `predict_step.py` predicts one. `measured.py`
searches with measured costs. `training_plan.py` and `found_plans.py` are the result.
"""
