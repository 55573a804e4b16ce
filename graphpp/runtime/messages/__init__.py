"""Messages between the stages of different ranks, and the memory layouts in which tensors travel and are copied."""
