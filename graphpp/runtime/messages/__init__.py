"""Messages between the stages of different ranks.

`mailbox.py` posts and awaits messages, `wire_layout.py` has the memory layouts in which tensors travel and are copied.
"""
