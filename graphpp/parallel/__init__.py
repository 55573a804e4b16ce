"""The ranks of a job: devices and process groups, agreement, messages, sums over replicas, lost ranks.

Knows process groups, and neither models nor schedules. `agreement.py`: all ranks go on together or all raise. `transport.py`:
messages over the group's backend or through shared memory (`same_host/`). `lost_rank.py` names a lost rank, `late_rank.py` the
line that a late rank has reached.
"""
