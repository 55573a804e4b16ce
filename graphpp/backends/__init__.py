"""Backends: Inductor or the caller's function compiles regions of operations; CUDA graphs replay whole stage programs."""
