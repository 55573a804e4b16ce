"""`parallel=`: the rank's device, data parallelism, and the overlap of collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from graphpp.arguments import INDEX, NUMBER, SECONDS, Accepted, callback, function_of, one_word, or_none, shown
from graphpp.errors import GraphPPError
from graphpp.options.option import FLOATING_DTYPE, Group, Option, group_reader

ReplicaValues = Literal["equal", "broadcast"]
ReplicaBuffers = Literal["own", "average", "broadcast"]
SumOrder = Literal["ranks", "any"]
NodeSeconds = Callable[[Any], float]  # node of a graph -> seconds
_MESH = Accepted("a DeviceMesh", lambda form: isinstance(form, DeviceMesh))
_TIMEOUT = Accepted("a positive number of seconds below 1e9", lambda form: NUMBER.accepts(form) and 0 < form < 1e9)  # type: ignore[operator]


def _read_device(form: object) -> torch.device | None:
    try:
        found: torch.device | None = None if form is None else torch.device(form)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        raise GraphPPError(f"take a torch.device or its name, got {shown(form)}: {str(error).splitlines()[0]}") from error
    if found is not None and found.type == "meta":
        raise GraphPPError("nothing runs on the meta device: take the device on which the model trains")
    if found is not None and found.type == "cpu" and found.index:
        raise GraphPPError(f"there is one CPU: take 'cpu', got {form!r}")
    return found


@dataclass(frozen=True)
class Parallel(Group):
    """A rank's device, data parallelism and overlap. Raises `GraphPPError` for values of other types."""

    prefix: ClassVar[str] = "parallel"

    device: Option[torch.device | str | None, torch.device | None] = Option(
        None,
        read=_read_device,
        describe=None,  # ranks compare the resulting device type instead
        takes="a device",
        about="Where this rank runs. None: the model's own CUDA device, else CUDA by `LOCAL_RANK` where every local rank has "
        "a GPU, else the CPU.",
    )
    op_costs: Option[NodeSeconds | None, NodeSeconds | None] = Option(
        None,
        read=or_none(function_of("a graph's node")),
        describe=lambda costs: ["None" if costs is None else "given"],
        takes="a function of a graph's node, the same on all ranks",
        about="The seconds of an operation, by which programs and the parts of OVERLAP_F_B are ordered and a recompute "
        "fraction is spent. None: `graphpp.passes.graph.op_costs.OpCosts`.",
    )
    check_data: Option[int, int] = Option(
        100,
        read=INDEX,
        about="Ranks of a pipeline compare the data that they were given: a checksum of all elements in the first 3 calls and "
        "then in every so many calls, and of a sample (of data on the CPU) in all others. 0: never.",
    )
    timeout: Option[float | None, float | None] = Option(
        None,
        read=or_none(_TIMEOUT),
        about="How long a step waits for another rank before `RankFailure` is raised. The process groups of `mesh=` keep this "
        "timeout. None: the timeout that the groups have.",
    )
    start_timeout: Option[float | None, float | None] = Option(
        None,
        read=or_none(_TIMEOUT),
        about="How long a rank waits while a new call is compiled, where the first rank captures for all. Also the timeout of "
        "the world's process group if graphpp makes it. None: the timeout that the groups have.",
    )
    slow_after: Option[float | None, float | None] = Option(
        30.0,
        read=or_none(_TIMEOUT),
        describe=None,  # may differ between ranks
        about="After how many seconds of waiting in a call this rank logs a warning, which names the message and its stage, or "
        "the rank that is late and the line that it has reached; at most one line each 10 times as many seconds. None: never.",
    )
    keep: Option[int | None, int | None] = Option(
        None,
        read=or_none(INDEX),
        takes="a number of stages, from 0",
        about="How many of its stages a rank holds whole at once; needs `mesh=` with the dimension `dp_shard`. None: all, so "
        "each is gathered once per step (ZeRO-1). With k stages the one that is needed last makes room, and its gradients are "
        "summed over the ranks before it goes, so that no more whole gradients stay than those of k stages. 0: no whole stage "
        "(ZeRO-3). Each forward and backward gathers one layer at a time, the next one ahead, and the gradients of a layer are "
        "summed over the ranks in every microbatch.",
    )
    param_dtype: Option[torch.dtype | None, torch.dtype | None] = Option(
        None,
        read=or_none(FLOATING_DTYPE),
        about="The dtype in which floating-point parameters are gathered over `dp_shard`, and compute, e.g. `torch.bfloat16`. "
        "The rows that a rank keeps, their gradients, the optimizer's states and checkpoints have the dtype of the model's own "
        "parameters. Buffers and inputs stay as they are. None: the parameters' own dtype.",
    )
    reduce_dtype: Option[torch.dtype | None, torch.dtype | None] = Option(
        None,
        read=or_none(FLOATING_DTYPE),
        about="The dtype in which gradients are sent over `dp_shard`. Those of all ranks are added in float32 or wider. None: "
        "the dtype in which they add up over the microbatches, which is that of the computation or `gradients.dtype`; with "
        "`keep=0` that of the computation.",
    )
    sum_order: Option[SumOrder, SumOrder] = Option(
        "ranks",
        read=one_word("ranks", "any"),
        about='In which order the gradients of data ranks are added. "ranks": that of the ranks, in float32 or wider, so that '
        'gradients have the bits of a loop over the ranks. "any": the order that the backend takes, in the dtype in which '
        "gradients are sent: a rank receives its sum (of NCCL's ring, tree or switch) in place of one part from each rank.",
    )
    expert_mesh: Option[DeviceMesh | None, DeviceMesh | None] = Option(
        None,
        read=or_none(_MESH),
        describe=None,  # ranks compare the mesh beside `mesh=`
        takes="a DeviceMesh",
        about="Where the experts are, if not in a dimension `ep` of `mesh=`: a mesh of the same ranks with the dimensions "
        "`pp`, `dp_replicate`, `dp_shard`, `ep` and `etp` (ranks that share each expert). Experts are then spread over ranks "
        "that share layers (`tp`) or sequences (`cp`) too, and each rank sends its own tokens. Experts are `DTensor`s over "
        '`expert_mesh["ep"]`, or over `expert_mesh["ep", "etp"]` if it has both.',
    )
    replica_values: Option[ReplicaValues, ReplicaValues] = Option(
        "equal",
        read=one_word("equal", "broadcast"),
        about="How replicas (the ranks along `dp_replicate`) begin. Replicas must have equal parameters and buffers; under "
        '"broadcast" the first replica sends its parameters and buffers to the others before the first training step (not on a '
        "mesh with `ep`).",
    )
    replica_buffers: Option[ReplicaBuffers, ReplicaBuffers] = Option(
        "own",
        read=one_word("own", "average", "broadcast"),
        about="The buffers that the forward writes, such as running statistics, after each training step. Each replica keeps "
        "its own; or floating-point buffers are averaged over the replicas; or the first replica sends its buffers to the "
        "others, as with `DistributedDataParallel(broadcast_buffers=True)`.",
    )

    @property
    def mixed(self) -> bool:
        """Whether shards are gathered, or gradients sent, in another dtype."""
        return self.param_dtype is not None or self.reduce_dtype is not None

    def node_seconds(self) -> NodeSeconds | None:
        """`op_costs` with checked results; None if not given."""
        return None if self.op_costs is None else callback(GraphPPError, "parallel.op_costs", SECONDS, self.op_costs)


ParallelLike = Parallel | torch.device | str | None
read_parallel = group_reader(Parallel, "device", lambda form: isinstance(form, torch.device | str))
