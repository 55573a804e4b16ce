"""Messages between the ranks of one host through shared memory, in place of gloo's TCP connections.

A message of gloo takes about half a millisecond after 20 ms of computing, most of it in the sender's call: it passes the
kernel's network stack twice, and wakes two threads. Here the sender copies the message into memory that both processes map, and
writes a frame of 36 bytes into the receiver's pipe. `messages.py` sends and receives, `memory.py` has pipes and slots.
`parallel/transport.py` is the door, and finds out whether the ranks of a group are on one host.
"""
