"""The data of a step: microbatches with tensors by path, cutting a batch, loss weights. May import options and `_torch`."""
