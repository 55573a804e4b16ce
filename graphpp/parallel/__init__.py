"""The ranks of a job: their devices and process groups, agreement among them, data-parallel replicas, lost ranks.

Knows process groups, and neither models nor schedules. `place.py`: this rank's device and groups. `agreement.py`: all ranks
go on together or all raise. `data_parallel.py`: averages gradients over replicas. `failure.py`: names the rank that was lost.
`groups.py`: process groups of some ranks. `same_host/`: messages through shared memory.
"""
