"""Messages between the ranks of one host through shared memory, in place of gloo's TCP connections.

A message of gloo passes the kernel's network stack twice, and wakes a thread of the receiver, which wakes the thread that
waits for the message. After 20 ms of computing this takes about half a millisecond, most of it in the sender's call. Here the
sender copies the message into memory that both processes map, and writes a frame of 40 bytes into the receiver's pipe, on which
the receiver's own thread waits.

    messages   `SameHost`: sends, receives, and the small exchanges of all ranks
    memory     pipes, slots and mappings
    connect    finds out whether the ranks of a group are on one host
"""
