"""The methods of a pipeline for this rank's parameters and buffers: memory, values, files.

Contract: the methods return the model's own objects. Methods marked "Called by all ranks" raise on all ranks and change
nothing, or on none. Other ranks' parameters and buffers take no memory here after `materialize` or `release`;
`gather` brings them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphpp.arguments import BYTES, FLAG, FUNCTION, INDEX, INTEGER, MAPPING, PATH, Accepted, checked, or_none, require
from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import RankPlace
from graphpp.pipeline.calls import Calls
from graphpp.pipeline.graph_cache import GraphCache
from graphpp.pipeline.module_habits import ModuleHabits
from graphpp.runtime.model_state import ModelState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from graphpp.checkpoint.folder import Checkpoint
    from graphpp.checkpoint.optimizer_state import Part


_FUNCTION = or_none(FUNCTION)
_DTYPE = Accepted("a floating-point torch.dtype", lambda value: isinstance(value, torch.dtype) and value.is_floating_point)


class RankPart(ModuleHabits):
    """The base of `Pipeline` for the parameters and buffers of this rank."""

    _model: nn.Module
    _place: RankPlace
    _state: ModelState
    _cache: GraphCache
    _calls: Calls

    @property
    def is_first(self) -> bool:
        """Whether this rank computes the first stage. Raises `GraphPPError` before anything is captured."""
        return self._cache.captured().plan.rank_of_stage[0] == self._place.rank

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the last stage, and so gets outputs. Raises `GraphPPError` before anything is captured."""
        plan = self._cache.captured().plan
        return plan.rank_of_stage[len(plan.stages) - 1] == self._place.rank

    @checked(GraphPPError, set_to_none=FLAG)
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, as `torch.nn.Module.zero_grad` does; before a capture, of all."""
        own = self._model.parameters() if self._cache.first is None else self.parameters()
        for parameter in (*own, *(each.parameter for each in self._cache.ownership.flat_parts)):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(FQN, parameter) of this rank's stages, in the model's order; the parameters are the model's own objects."""
        return self._state.named(self._cache.ownership.local, among=self._state.parameters)  # type: ignore[return-value]

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, in the model's order, for the optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def flat_parameters(self) -> list[tuple[tuple[str, ...], nn.Parameter]]:
        """(FQNs, parameter [elements]): this rank's parameters in a few plain tensors, where `mesh=` has `dp_shard`.

        Each has this rank's rows of several parameters of one stage and dtype; vectors are kept apart from other parameters. An
        elementwise optimizer (SGD, Adam, AdamW) steps these tensors faster than `pipe.parameters()`, whose memory they share; a
        parameter without a gradient has gradient 0 here. Checkpoints name the state by FQN. Clip with `pipe.clip_grad_norm_`.
        Raises `GraphPPError` without `dp_shard`, and before the parameters are sharded.
        """
        self._cache.captured()
        sharded = self._cache.ownership.sharded
        if sharded is None:
            raise GraphPPError(
                "flat_parameters: the parameters are not sharded: give a mesh= with the dimension dp_shard (of more than one "
                "rank), and values by pipe.materialize to a model on the meta device"
            )
        return list(sharded.flat_parameters())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(FQN, buffer) of this rank's stages, in the model's order."""
        return self._state.named(self._cache.captured().buffers(self._place.rank), among=self._state.buffers)

    def buffers(self) -> Iterator[torch.Tensor]:
        """The buffers of `named_buffers`."""
        return (buffer for _, buffer in self.named_buffers())

    def state_dict(self) -> dict[str, Any]:
        """This rank's entries of the model's state dict, under the model's keys; all ranks' entries make up the whole dict."""
        return self._state.state_dict(self._cache.ownership.local)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's entries of `state` (a rank's or the whole model's dict) into the model, in place.

        Raises `GraphPPError`, changing nothing, if an entry is missing, unknown to the model (`strict`) or of another shape.
        """
        self._state.load(self._cache.ownership.local, state, strict)

    @checked(GraphPPError, init=_FUNCTION, weights=or_none(PATH), names=_FUNCTION, seed=or_none(INTEGER), strict=FLAG)
    def materialize(
        self,
        init: Callable[[nn.Module], object] | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
        names: Callable[[str], str] | None = None,
        seed: int | None = None,
        strict: bool = True,
    ) -> None:
        """Give this rank's part of a model on the meta device memory and values. Called by all ranks.

        `init`: called with every module, children first, as by `model.apply(init)`; None calls the modules' `reset_parameters`.
        The values are bit-equal to those of one process that holds the whole model and starts from the same random state, for
        every split and number of ranks, but each rank spends the time of the whole model. `seed` gives each module its own
        generator, so each rank initialises only its part: the values are other ones, and again equal for every split.

        `weights`: a folder or file to read the values from: safetensors with or without an index (Hugging Face), a file of
        `torch.save`, a folder of torch's distributed checkpoint or of `pipe.checkpoint`. Only this rank's tensors are read.
        `names` maps a key of the model's state dict to the name in the files. With `strict` every tensor of the files must
        belong to the model, and the files must have every entry of this rank; otherwise a warning is logged, and `init` writes
        the missing entries. `init`, seeded with `seed` or 0, writes meta buffers that no state dict has.

        `init` runs without gradients. Tensors with memory keep their memory, and are written too. A new object replaces each
        parameter on the meta device, so make the optimizer afterwards. Other ranks' tensors become stand-ins without memory
        (see `release`). Raises `GraphPPError` before anything is captured and for a tensor that nothing writes,
        `CheckpointError` for files that do not fit; then the tensors on the meta device and the random generators are restored.
        """
        # Imports safetensors and torch.distributed.checkpoint, which would add a second to `import graphpp`.
        from graphpp.ownership.materialize import Materials, Source

        if self._cache.first is not None and self._cache.ownership.sharded is not None:
            raise GraphPPError(
                "materialize: the parameters have values, and each rank holds its shards of them: load others with "
                "pipe.load_state_dict or pipe.checkpoint(...).load, or compile the model on the meta device"
            )
        source = Source(init, None if weights is None else Path(weights).expanduser().resolve(), names, seed, strict)
        materials = Materials(self._model, self._state, self._place.device)
        lines = source.describe(self._place.device)
        everything, owned = (*self._state.parameters, *self._state.buffers), self._cache.ownership
        local, held = owned.local, owned.first_holders()
        needed = [fqn for fqn in everything if fqn in local]
        unread = [fqn for fqn in everything if fqn not in held]

        try:
            with self._calls.all_replicas("materialize"), self._calls.all_ranks("materialize", lines) as alike:
                shards = owned.shards_to_fill()
                alike["the save of the weights"] = [materials.fill(needed, unread, source, shards)]
        except BaseException:
            materials.undo()
            raise
        owned.release_if_asked()
        owned.shard_if_asked(shards)

    def release(self) -> int:
        """Free the memory of the parameters and buffers of other ranks; returns the number of bytes.

        Stand-ins on the meta device replace them in the model. Any read of a stand-in's value, as by `model(x)`,
        `model.state_dict()` or an optimizer of `model.parameters()`, raises `GraphPPError`. Give `pipe.parameters()` to the
        optimizer, and compile all pipelines of the model first. Raises `GraphPPError` before anything is captured.
        """
        return self._cache.ownership.release()

    @checked(GraphPPError, rank=or_none(INDEX))
    def gather(self, names: str | Sequence[str] = "all", rank: int | None = 0) -> dict[str, torch.Tensor]:
        """Entries of the whole model's state dict, in the host memory of one rank. Called by all ranks.

        `names`: keys of the model's state dict, or "all". `rank`: of the pipeline, None for every rank; the others get an empty
        dict. Tensors are sent one by one, so a rank's memory has at most one more tensor than it asked for. Raises
        `GraphPPError` on all ranks for an unknown key.
        """
        from graphpp.ownership.export import gathered, keys_of  # imports safetensors

        known = {key: value for key, value in self._state.entries().items() if isinstance(value, torch.Tensor)}

        with self._calls.all_ranks("gather", {"its arguments": [f"names={names!r}", f"rank={rank}"]}):
            if rank is not None and rank >= self._place.ranks:
                raise GraphPPError(f"rank: the pipeline has ranks 0..{self._place.ranks - 1}, got {rank}")
            entries = {key: known[key] for key in keys_of(names, known)}
            self._check_entries()
        with self._calls.watched(), self._calls.exchanging(), torch.no_grad():
            return gathered(entries, self._holders(), self._place, rank)

    @checked(GraphPPError, folder=PATH, names=_FUNCTION, dtype=or_none(_DTYPE), max_file_bytes=BYTES)
    def save_weights(
        self,
        folder: str | os.PathLike[str],
        *,
        names: Callable[[str], str] | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = 2**30,
    ) -> None:
        """Write the whole model as safetensors for Hugging Face, or for `materialize(weights=folder)`. Called by all ranks.

        Each rank writes its own part into a file system that all ranks share, at most `max_file_bytes` (or one tensor) at a
        time. `names` maps a key of the model's state dict to the name in the files; a tensor with several keys is written under
        the first. `dtype` converts floating-point tensors. Replaces weights of an earlier `save_weights`. Raises
        `CheckpointError` on all ranks for a folder with other weights, and for entries of the state dict that are no tensors.
        """
        from graphpp.ownership.export import Export

        path = Path(folder).expanduser().resolve()
        export = Export(self._state.entries(), self._holders(), names, dtype, max_file_bytes)
        with self._calls.all_replicas(f"save_weights {path}"):
            export.save(path, self._place, self._calls, self._check_entries)

    def checkpoint(self, *objects: Stateful, extra: Mapping[str, Any] | None = None) -> Checkpoint:
        """The training state, to save and to load: `pipe.checkpoint(optimizer, scheduler).save("folder")`.

        `objects`: optimizers of this rank's parameters, and other objects with `state_dict` and `load_state_dict`, such as
        learning-rate schedulers and gradient scalers, in the same order on every rank. `extra`: further values by name, equal
        on all ranks: plain data, or objects with a state, such as a data loader. A checkpoint always has the model's parameters
        and buffers, the random generator's state and the number of training calls. Its names do not depend on ranks, stages or
        schedule, so another layout can load it. Raises `GraphPPError` before anything is captured, and `CheckpointError` for an
        object without a state.
        """
        # Imports torch.distributed.checkpoint and SymPy, which would add a second to `import graphpp`.
        from graphpp.checkpoint.folder import Checkpoint
        from graphpp.checkpoint.training_state import TrainingState, check_stateful

        self._cache.captured()
        require(GraphPPError, "extra", MAPPING, {} if extra is None else extra)
        optimizers, others = check_stateful(objects, extra or {})
        calls, place = self._calls, self._place
        values = dict(extra or {})
        check = partial(self._state.check_listed, self._cache.ownership.local)
        where = place.device, place.first_holder
        state = TrainingState(self, self._state.entries, check, optimizers, others, values, *where, calls, self._flat_parts)
        return Checkpoint(state, place)

    def _flat_parts(self) -> dict[int, list[Part]]:
        """The parts of each flat parameter that `flat_parameters` has returned, by the `id` of the flat parameter."""
        from graphpp.checkpoint.optimizer_state import Part  # `checkpoint` has imported it

        return {
            id(flat.parameter): [Part(fqn, self._state.tensor(fqn), partial(flat.rows, fqn)) for fqn in flat.fqns]
            for flat in self._cache.ownership.flat_parts
        }

    def _check_entries(self) -> None:
        """Raise `GraphPPError` if one of this rank's tensors is not in the state dict or has no memory."""
        local = self._cache.ownership.local
        self._state.check_memory(local)
        self._state.check_listed(local)

    def _holders(self) -> dict[int, int]:
        """The first rank that holds a tensor, by the tensor's `id`."""
        return {id(self._state.tensor(fqn)): rank for fqn, rank in self._cache.ownership.first_holders().items()}
