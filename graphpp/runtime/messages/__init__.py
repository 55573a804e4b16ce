"""Messages between the stages of different ranks, and the memory layouts in which tensors travel and are copied.

`transport.py` posts and awaits messages; `wire_layout.py` has the order of a tensor's elements in a message;
`strided_copies.py` copies tensors in that order.
"""
