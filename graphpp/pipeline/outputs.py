"""The model's output of a call: joined over the microbatches, and sent to the ranks that ask for it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from graphpp._torch import pytree
from graphpp.arguments import one_word, require
from graphpp.batch.batch_dims import BatchDims
from graphpp.batch.microbatch import without_data
from graphpp.capture.outputs import joined_dims, merge_outputs
from graphpp.errors import BatchError, GraphPPError
from graphpp.pipeline.cache_key import StepCall
from graphpp.pipeline.graph_cache import PreparedStep
from graphpp.runtime.runner import GraphPPRunner

OutputRanks = Literal["last", "all", "each"]
OUTPUT_RANKS = one_word("last", "all", "each")
Exchange = Callable[[Callable[[], bytes]], list[bytes]]


def asked_with(call: str, output: OutputRanks) -> str:
    """The name of a call, which tells ranks apart that ask for other outputs."""
    return call if output == "last" else f"{call}, output={output}"


def require_output(output: OutputRanks, call: StepCall, prepared: PreparedStep, dims: BatchDims, kept: bool = True) -> None:
    """Raise `GraphPPError` for other values, and for outputs that a step does not keep or that cannot be joined.

    Equal on all ranks, before anything runs.
    """
    require(GraphPPError, "output", OUTPUT_RANKS, output)
    if output != "last" and not kept:
        raise GraphPPError(f"output={output!r}: steps keep no outputs: give memory=graphpp.Memory(outputs=True)")
    if kept and output != "each":
        graphs = prepared.lowered.graphs
        joined_dims(graphs[0].captured, [graph.output_shapes for graph in graphs], call.parts, dims)


def taken_output(call: StepCall, prepared: PreparedStep, dims: BatchDims, output: OutputRanks = "last") -> Any:
    """The output of the whole batch, or with "each" of each microbatch, on the rank of the last stage; None elsewhere."""
    outputs, graphs = prepared.runner.take_outputs(), prepared.lowered.graphs
    if outputs is None:
        return None
    if output != "each":
        return merge_outputs(graphs[0].captured, outputs, call.parts, dims)
    rows = zip(graphs, outputs, call.parts, strict=True)
    return [merge_outputs(graph.captured, [own], [part], dims) for graph, own, part in rows]


def shared_output(output: Any, ranks: OutputRanks, runner: GraphPPRunner, last: bool, exchange: Exchange) -> Any:
    """The output of the last stage's rank on the ranks that ask for it. Called by all ranks.

    `last`: whether this is that rank. `exchange` sends bytes of every rank to all.
    """
    if ranks == "last":
        return output
    described = exchange(lambda: as_bytes(output, "output") if last else b"")
    structure = pickle.loads(next(filter(None, described)))
    leaves, spec = pytree.tree_flatten(output if last else structure)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            sent = leaf.contiguous() if last else torch.empty(leaf.shape, dtype=leaf.dtype, device=runner.place.device)
            runner.from_last_stage(sent)
            leaves[at] = leaf if last else sent
    return pytree.tree_unflatten(leaves, spec)


def as_bytes(tree: Any, what: str) -> bytes:
    """The structure and plain data of a tree, with meta tensors in place of its tensors.

    Raises `BatchError` for an object that cannot be pickled, which no other rank can have.
    """
    try:
        return pickle.dumps(pytree.tree_map(without_data, tree))
    except Exception as error:  # pickle has no class of its own for an unknown object
        raise BatchError(f"{what}: no other rank can have an object in it ({error}): give tensors and plain data") from error


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
