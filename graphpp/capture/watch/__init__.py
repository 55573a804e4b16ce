"""Watch the state outside of tensors that a captured graph depends on: attributes, objects, hooks, functions, globals."""
