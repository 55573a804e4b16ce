"""The search for the fastest way to train a model on machines that need not exist.

`costs/` prices one captured model in seconds and bytes; `plans/` searches meshes, schedules and memory options with these
prices (`graphpp.plan`).
"""
