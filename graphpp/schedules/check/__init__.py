"""Proofs about a table before it runs. Every check raises `ScheduleError` naming rank and column of the fault."""
