"""Rewrites: one file per function from a table to a table, such as add_send_recv, split_backward and batch_p2p.

A rewrite keeps every guarantee of `graphpp.schedules.check`. May import `graphpp.schedules.table` and `check`.
"""
