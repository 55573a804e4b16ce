"""Proofs about a table before it runs: complete, free of deadlock, messages in order, parameters whole, memory within a cap.

Every check raises `ScheduleError` naming rank and column of the fault. May import `graphpp.schedules.table` alone.
"""
