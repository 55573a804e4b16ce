"""Capture models with `DTensor` parameters without an export: `torch.export` loses the gradients of `DTensor`s."""
