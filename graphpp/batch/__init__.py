"""The data of a step: a microbatch and its tensors by path, a batch cut into microbatches, the weights of their losses.

May import options and `_torch`.
"""
