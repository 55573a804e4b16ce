"""`graphpp.verify`: one step as stage programs, as the uncut joint graph and in eager, compared in one process.

`verify.py` puts the parts together: `subject.py` compiles, `runs.py` runs, `tolerances.py` measures rounding,
`first_difference.py` locates the first difference, `report.py` is the result. `whole_batch.py` compares with the uncut batch.
"""
