"""`PostValidation` (experimental): steps the optimizer before the norm of all gradients is known, and checks it afterwards.

Contract
--------
- Every rank ends with the bits of the synchronous step: parameters, optimizer state, norm, loss scale, and `param.grad` as that
  step leaves it. Which ranks stepped early changes nothing but time. (One difference: a fused Adam whose first step the scaler
  skips has no state yet, where the scaler's own skipping leaves zeros.)
- A rank steps early only if the all-reduce of the norms is pending, and its own gradients need no clipping and have no
  overflow. Every other rank waits for the all-reduce, as all ranks do in the synchronous step.
- When `step` returns or raises, no unchecked step remains. A step that was wrong, or that cannot be checked any more because a
  rank is lost, is rolled back.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from graphpp._torch.distributed import has_step_hooks
from graphpp.arguments import one_of, require
from graphpp.batch.loss_weights import DeferredScaler
from graphpp.errors import GraphPPError
from graphpp.pipeline import grad_norm as norms
from graphpp.pipeline.optimizer_rollback import OptimizerSnapshot
from graphpp.pipeline.pipeline import Pipeline


class _NormTables(NamedTuple):
    """Tables of norms (`grad_norm.own_norms`): this rank's own, and the pending sum over all ranks.

    The tables have one number more, without a dtype, so that it counts for no norm: the number of ranks with an overflow.
    """

    own: torch.Tensor
    pending: norms.PendingNorms


class _Verdict(NamedTuple):
    """The conclusion from a table of norms; `amends`: the gradients must be clipped, or overflow, before a step."""

    norm: torch.Tensor
    overflow: bool
    amends: bool


_OPTIMIZERS = one_of(Optimizer, list, tuple, takes="an optimizer, or a list of optimizers")


class PostValidation(DeferredScaler):
    """Clip and step without waiting: `norm = PostValidation(pipe, optimizer, max_norm=1.0).step()` after `pipe.step`.

    Experimental, and slower in every case measured so far: on two CPU ranks AdamW's part of a step takes 1.5 times as long as
    the synchronous one, 1.2 times with one rank 10 ms late, and 3.2 times where clipping applies (`benchmarks/RESULTS.md`). It
    can pay only where the norm's all-reduce takes longer than copying parameters and optimizer state, and clipping is rare.

    Computes the bits of `norm = pipe.clip_grad_norm_(max_norm, norm_type); optimizer.step()`. While the all-reduce of the norms
    is pending, each rank steps with unclipped gradients. If the norm then demands clipping, or is not finite, the rank rolls
    the step back and steps once more with clipped gradients. A rank stops copying as soon as the norm is known, and then
    steps synchronously. The method is post-validation (arXiv:2401.10241, section 4), with two differences: a rank learns the
    norm before `step` returns, not in the next step's warm-up, because the next `pipe.step` begins with an agreement of all
    ranks; and steps are rolled back from copies, because inverse arithmetic is not exact.

    `optimizer`: one; several that share the rank's parameters; or [] on a rank without parameters. Any optimizer will do that
    keeps its memory in `state` and `param_groups`, such as all of torch.optim that step without a closure. Its learning rate
    and other settings may change between steps. A rank whose optimizer has step hooks never steps early: they would run
    twice. Memory: a rank that steps early keeps a copy of the optimizer's parameters and state from step to step.

    `scaler`: a `torch.amp.GradScaler`. `step` then unscales too, and skips the step on all ranks if one rank has an overflow,
    as `scaler.unscale_(optimizer); pipe.clip_grad_norm_(..); scaler.step(optimizer)` does; call `scaler.update()` afterwards.
    Pass this object, in place of the scaler, to `pipe.step(..., scaler=)`: then no rank waits for the overflow check there.

    `taken`: steps that this rank took before it knew the norm. `rolled_back`: how many of them it rolled back.

    Raises `GraphPPError` if an optimizer's step cannot be rolled back. Called by every rank.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: Optimizer | Sequence[Optimizer],
        max_norm: float,
        norm_type: float = 2.0,
        scaler: GradScaler | None = None,
    ) -> None:
        if not isinstance(pipe, Pipeline):
            raise GraphPPError(f"PostValidation takes a pipeline, then its optimizer, got {type(pipe).__name__}")
        if any(each is not None for each in (pipe._place.sharding, pipe._place.layers, pipe._place.experts)):
            raise GraphPPError(
                "PostValidation judges a rank's step by whole gradients, and with dp_shard, tp or ep a rank has parts of them: "
                "use pipe.clip_grad_norm_ and optimizer.step()"
            )
        self._pipe = pipe
        self._clipping = norms.read_clipping(max_norm, norm_type)
        require(GraphPPError, "optimizer", _OPTIMIZERS, optimizer)
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if not self._optimizers and any(True for _ in pipe.parameters()):
            raise GraphPPError("optimizer: [] is for a rank without parameters, and this rank has some: give their optimizer")
        for each in self._optimizers:
            _check(each)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise GraphPPError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self.scaler = scaler
        self._snapshot = OptimizerSnapshot(self._optimizers)
        self._witness: Optimizer | None = None
        self.taken = self.rolled_back = 0

    def step(self) -> torch.Tensor:
        """Clip and step; returns the norm before clipping, 0-dim, the same on every rank as from `pipe.clip_grad_norm_`."""
        with self._pipe._calls.watched():
            _, gradients = self._pipe._calls.agreed(
                "PostValidation.step", lambda: (self._clipping, self._pipe._gradients())
            )
            tables = self._begin(gradients)
            early = self._steps_early(tables, gradients.own_codes) and self._snapshot.take(tables.pending.arrived)
            with self._rolled_back_on_error(early):
                if early:
                    self._advance()
                verdict = self._wait(tables)
            self.taken += early
            if early and verdict.amends:
                self._snapshot.restore()
                self.rolled_back += 1
            self._snapshot.forget()
            if verdict.amends:
                verdict = self._amend(gradients, verdict)
            if not verdict.overflow and (verdict.amends or not early):
                self._advance()
            self._tell_scaler(verdict.overflow, gradients.device)
        return verdict.norm

    # ------------------------------------------------------------------------------------------------ inside

    @torch.no_grad()
    def _begin(self, gradients: norms.RankGradients) -> _NormTables:
        """Unscale the gradients and start the all-reduce of the norms."""
        scaler = self._scales
        overflow = scaler is not None and bool(norms.overflow(gradients))
        if scaler is not None:
            for optimizer in self._optimizers:
                scaler.unscale_(optimizer)
        widened = replace(gradients, codes=(*gradients.codes, 0))
        table = norms.own_norms(widened, self._clipping.norm_type)
        table[-1] = overflow
        return _NormTables(table.clone(), norms.all_reduce_(table, widened, self._clipping.norm_type))

    def _steps_early(self, tables: _NormTables, codes: tuple[int, ...]) -> bool:
        """Step early only if the all-reduce is pending and this rank's own gradients need no clipping and have no overflow."""
        if tables.pending.arrived() or not self._optimizers or any(map(has_step_hooks, self._optimizers)):
            return False
        return not self._judge(tables.own, norms.total_of(tables.own, (*codes, 0), self._clipping.norm_type)).amends

    def _wait(self, tables: _NormTables) -> _Verdict:
        """Wait for the all-reduce; the verdict on the norms of all ranks."""
        norm = tables.pending.total()
        return self._judge(tables.pending.norms, norm)

    def _judge(self, table: torch.Tensor, norm: torch.Tensor) -> _Verdict:
        overflow = bool(table[-1] > 0)
        return _Verdict(norm, overflow, overflow or norms.clips(self._clipping.max_norm, norm))

    def _advance(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    @contextlib.contextmanager
    def _rolled_back_on_error(self, early: bool) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if early:
                self._snapshot.restore()
            raise

    @torch.no_grad()
    def _amend(self, gradients: norms.RankGradients, verdict: _Verdict) -> _Verdict:
        """Change the gradients as the synchronous step does: mark an overflow, take the norm, clip."""
        norm = verdict.norm
        if verdict.overflow:
            norms.mark_overflow_(gradients, torch.ones((), device=gradients.device))
            norm = norms.total_norm(gradients, self._clipping.norm_type)
        norms.clip_(gradients, self._clipping.max_norm, norm)
        return _Verdict(norm, verdict.overflow, amends=True)

    @property
    def _scales(self) -> GradScaler | None:
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def _tell_scaler(self, overflow: bool, device: torch.device) -> None:
        """Report an overflow of any rank to the scaler's `update`: unscale one number of an optimizer made for this."""
        scaler = self._scales
        if scaler is None:
            return
        if self._witness is None:
            self._witness = torch.optim.SGD([torch.zeros(1, device=device)], lr=0.0)
        number = self._witness.param_groups[0]["params"][0]
        number.grad = torch.full_like(number, math.inf if overflow else 0.0)
        scaler.unscale_(self._witness)


def _check(optimizer: object) -> None:
    """Raise `GraphPPError` if the optimizer cannot step here, or its step cannot be rolled back."""
    if not isinstance(optimizer, Optimizer):
        raise GraphPPError(f"PostValidation needs torch optimizers, got {type(optimizer).__name__}")
    if getattr(optimizer, "process_group", None) is not None:
        raise GraphPPError(
            f"{type(optimizer).__name__} exchanges values with other ranks in its step, which each rank alone would take back: "
            "use pipe.clip_grad_norm_ and optimizer.step() with this optimizer."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise GraphPPError(
            f"{type(optimizer).__name__} steps with a closure, which runs the model again: PostValidation has none to give. "
            "Any optimizer that steps without one will do."
        )
    OptimizerSnapshot([optimizer]).check()
