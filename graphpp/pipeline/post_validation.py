"""`PostValidation`: the optimizer's step is taken before the norm of all gradients is known, and checked afterwards.

Contract
--------
- Same bits as the synchronous step on every rank: parameters, optimizer state, the norm, the loss scale; and `param.grad`
  is left as that step leaves it. Which ranks went ahead changes nothing but time. (One difference: a fused Adam whose very
  first step the scaler skips has no state yet, where the scaler's own skipping leaves it zeros.)
- A rank goes ahead only while the norm is on its way and nothing here speaks against it: a rank whose own gradients have
  to be clipped already, or overflow, waits for the sum, as all ranks always do in the synchronous step.
- When `step` returns or raises, no step that was not checked is left: what was wrong, or can no longer be checked because
  a rank is lost, has been taken back.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from graphpp._torch.distributed import has_step_hooks
from graphpp.errors import GraphPPError
from graphpp.pipeline import grad_norm as norms
from graphpp.pipeline.optimizer_rollback import OptimizerSnapshot

if TYPE_CHECKING:
    from graphpp.pipeline.pipeline import Pipeline


class _Sums(NamedTuple):
    """Tables of norms: this rank's, and the sum over ranks on its way.

    The last column has no dtype, so it counts for no norm: there stands how many ranks have an overflow.
    """

    own: torch.Tensor
    coming: norms.Gathering


class _Found(NamedTuple):
    """What the norms say; `amends`: the gradients are not what an optimizer may step with."""

    norm: torch.Tensor
    overflow: bool
    amends: bool


class PostValidation:
    """Clip and step without waiting: `norm = PostValidation(pipe, optimizer, max_norm=1.0).step()` after `pipe.step`.

    Does what `norm = pipe.clip_grad_norm_(max_norm, norm_type); optimizer.step()` does, to the bit. While the norms of the
    ranks are added up, the ranks step with unclipped gradients; if the norm then demands clipping, or is not finite, the
    step is taken back and taken again with clipped ones (post-validation, arXiv:2401.10241, section 4; there a rank learns
    the outcome in the next step's warm-up, here before `step` returns, and steps are taken back from copies, because
    inverse arithmetic is not exact). A rank stops copying as soon as the norm is there, and then steps as it would have.
    What is won is the wait for the norm, not more: the next `pipe.step` begins with an agreement of all ranks. It pays where
    that wait is longer than copying, and clipping is rare.

    `optimizer`: one, several that share the rank's parameters out, or none on a rank without parameters ([]): any that
    holds what it remembers in `state` and `param_groups`, such as all of torch.optim that step without a closure. Its
    learning rate and other settings may change between steps. Hooks on its step are not run twice: with hooks it waits.
    Costs, on a rank that goes ahead, a copy of the optimizer's parameters and state, kept from step to step.

    `scaler`: a `torch.amp.GradScaler`. `step` then unscales as well, and where one rank finds an overflow all skip the step,
    as in `scaler.unscale_(optimizer); pipe.clip_grad_norm_(..); scaler.step(optimizer)`; call `scaler.update()` after it.
    Hand this object to `pipe.step(..., scaler=)` in the scaler's place, so that nobody waits for the inf check there.

    `taken`: steps that this rank took before it knew the norm. `rolled_back`: how many of them it took back.

    Raises `GraphPPError` where an optimizer's step cannot be taken back. Called by every rank.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: Optimizer | Sequence[Optimizer],
        max_norm: float,
        norm_type: float = 2.0,
        scaler: GradScaler | None = None,
    ) -> None:
        self._pipe, self._max_norm, self._norm_type = pipe, max_norm, norm_type
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in self._optimizers:
            _check(each)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise GraphPPError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self.scaler = scaler
        self._undo = OptimizerSnapshot(self._optimizers)
        self._witness: Optimizer | None = None
        self.taken = self.rolled_back = 0

    def step(self) -> torch.Tensor:
        """Clip and step; returns the norm before, 0-dim, on every rank what `pipe.clip_grad_norm_` would return."""
        with self._pipe._watched():
            gradients = self._pipe._gradients()
            sums = self._begin(gradients)
            early = self._goes_ahead(sums) and self._undo.keep(sums.coming.arrived)
            with self._taken_back_on_error(early):
                if early:
                    self._advance()
                found = self._find(sums)
            self.taken += early
            if early and found.amends:
                self._undo.back()
                self.rolled_back += 1
            self._undo.forget()
            if found.amends:
                found = self._amend(gradients, found)
            if not found.overflow and (found.amends or not early):
                self._advance()
            self._tell_scaler(found.overflow, gradients.device)
        return found.norm

    # ------------------------------------------------------------------------------------------------ inside

    @torch.no_grad()
    def _begin(self, gradients: norms.Gradients) -> _Sums:
        """Unscale the gradients and begin to add up the norms."""
        scaler = self._scales
        overflow = scaler is not None and bool(norms.overflow(gradients))
        if scaler is not None:
            for optimizer in self._optimizers:
                scaler.unscale_(optimizer)
        table = norms.own_norms(replace(gradients, places=gradients.places + 1), self._norm_type)
        table[0, -1] = overflow
        return _Sums(table.clone(), norms.gather_(table, self._norm_type, gradients.group))

    def _goes_ahead(self, sums: _Sums) -> bool:
        """Whether this rank has a reason to step before it knows: it would have to wait, and sees nothing wrong itself."""
        if sums.coming.arrived() or not self._optimizers or any(map(has_step_hooks, self._optimizers)):
            return False
        return not self._judge(sums.own, norms.total_of(sums.own, self._norm_type)).amends

    def _find(self, sums: _Sums) -> _Found:
        """Wait for the sum."""
        norm = sums.coming.total()
        return self._judge(sums.coming.table, norm)

    def _judge(self, table: torch.Tensor, norm: torch.Tensor) -> _Found:
        overflow = bool(table[0, -1] > 0)
        return _Found(norm, overflow, overflow or norms.clips(self._max_norm, norm))

    def _advance(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    @contextlib.contextmanager
    def _taken_back_on_error(self, early: bool) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if early:
                self._undo.back()
            raise

    @torch.no_grad()
    def _amend(self, gradients: norms.Gradients, found: _Found) -> _Found:
        """Change the gradients as the synchronous step does, which marks an overflow before it takes the norm."""
        norm = found.norm
        if found.overflow:
            norms.mark_overflow_(gradients, torch.ones((), device=gradients.device))
            norm = norms.total_norm(gradients, self._norm_type)
        norms.clip_(gradients, self._max_norm, norm)
        return _Found(norm, found.overflow, amends=True)

    @property
    def _scales(self) -> GradScaler | None:
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def _tell_scaler(self, overflow: bool, device: torch.device) -> None:
        """Let the scaler's `update` hear of any rank's overflow: from one more optimizer, over a number of its own."""
        scaler = self._scales
        if scaler is None:
            return
        if self._witness is None:
            self._witness = torch.optim.SGD([torch.zeros(1, device=device)], lr=0.0)
        number = self._witness.param_groups[0]["params"][0]
        number.grad = torch.full_like(number, math.inf if overflow else 0.0)
        scaler.unscale_(self._witness)


def _check(optimizer: object) -> None:
    """Refuse what cannot step, or whose step cannot be taken back."""
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
