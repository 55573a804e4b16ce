"""The machine that runs stage programs: actions, schedules, checker, stage, point-to-point, runner."""
