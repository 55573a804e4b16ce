"""Gradients from a program's result to `param.grad`: sinks, sums over microbatches, sums over tied stages.

A program hands its gradients to a sink (`gradient_sink.py`), which adds them to the stage's sums (`accumulate.py`), by a
multiplication that writes into the sum where the backend allows it (`gemm_accumulation.py`). At the end of the step the partial
sums of tied parameters are added over their stages (`tied.py`).
"""
