"""`graphpp.verify`: one step as stage programs, as the uncut joint graph and in eager, compared in one process.

`subject.py` compiles, `runs.py` runs the step, `tolerances.py` measures the effect of rounding, `first_difference.py` finds the
first value that differs, `report.py` is the result, `verify.py` puts them together. `whole_batch.py` compares the step with a
step over the uncut batch.
"""
