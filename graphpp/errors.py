"""The errors that graphpp raises. Each says what is wrong, where (FQN, source line, row and column), and what to do.

Each is a `GraphPPError` and the built-in error that a caller would expect, such as `ValueError`.
"""


class GraphPPError(Exception):
    """Base of all errors that graphpp raises on purpose."""


class CaptureError(GraphPPError, RuntimeError):
    """The model, its loss or its example cannot be captured as one joint graph with correct gradients."""


class SplitError(GraphPPError, ValueError):
    """`split=` names modules that do not exist, run in another order, or do not fit the number of stages."""


class ScheduleError(GraphPPError, ValueError):
    """A schedule is unknown, malformed, incomplete, or does not fit the stages, ranks and microbatches."""


class NoPlanError(ScheduleError):
    """No plan of a search fits the memory; the message names the closest one and the bytes that it takes."""


class BatchError(GraphPPError, ValueError):
    """A batch does not fit: not divisible into microbatches, target missing, shapes other than captured."""


class CheckpointError(GraphPPError, RuntimeError):
    """A checkpoint is missing, incomplete, of another training, or has values that are no plain data."""


class MismatchError(GraphPPError, RuntimeError):
    """Ranks were given different models, splits, schedules or shapes; every rank raises it."""


class RankFailure(GraphPPError, RuntimeError):  # noqa: N818 - it names an event on another rank
    """Another rank died or left the step; the message names that rank."""
