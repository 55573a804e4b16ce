"""Watch the state outside of tensors that a captured graph depends on, between the steps of a training."""
