"""The private names of torch's pipeline runtime. Importing this file imports Dynamo, about a second: import it in functions.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch.distributed.pipelining.schedules._PipelineScheduleRuntime`: executes a rank's actions in `_step_microbatches`, which
  `runtime/action_loop.py` overrides: torch's looks up, names and logs every action in every step, 6 to 9 us each
- `torch.distributed.pipelining.schedules._Action`: one instruction (`parts` of `Action` are its `sub_actions`)
- `torch.distributed.pipelining.schedules._ComputationType`: kinds of instructions, none for batched sends and receives
"""

from __future__ import annotations

from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

PipelineScheduleRuntime = _PipelineScheduleRuntime
TorchAction = _Action
ComputationType = _ComputationType
