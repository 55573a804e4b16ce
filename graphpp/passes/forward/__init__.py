"""Passes over an exported forward, before the joint trace writes the backward of each operation.

A pass stands here if its effect on the forward decides which backward kernel autograd takes.
"""
