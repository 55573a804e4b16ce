"""The ranks of a job: their devices and process groups, agreement among them, messages, sums over replicas, lost ranks.

Knows process groups, and neither models nor schedules. `place.py`: this rank's device and groups. `agreement.py`: all ranks go
on together or all raise. `transport.py`: messages, over the group's backend or through shared memory (`same_host/`).
`data_parallel.py`: averages gradients over replicas, in the order of `sums.py`. `lost_rank.py`: names the rank that was lost,
`late_rank.py` the line that a late rank has reached.
"""
