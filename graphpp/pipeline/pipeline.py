"""`Pipeline`, which `graphpp.compile` returns: cuts a batch into microbatches, runs them, and gathers the results.

Contract: every method that runs a step or a collective must be called by all ranks, and raises on all ranks or on none. Of the
caller's model a call changes only `param.grad` and the device and values of this rank's parameters and buffers; a refused call
changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.hooks import RemovableHandle

from graphpp._torch.autograd import call_gradient_hooks, profiled
from graphpp.arguments import COUNT, FLAG, FUNCTION, INTEGER, PATH, checked, one_of, or_none, require
from graphpp.batch.loss_weights import NO_WEIGHTS, LossArguments, LossWeight, wide
from graphpp.batch.microbatch import Microbatch, whole_each
from graphpp.capture.loss import LossFunction
from graphpp.compiler.request import CompileRequest
from graphpp.errors import GraphPPError
from graphpp.options.options import Options
from graphpp.ownership.freed_memory import keep_freed_memory
from graphpp.parallel.agreement import Agreement
from graphpp.parallel.rank_place import RankPlace
from graphpp.parallel.transport import connect
from graphpp.pipeline import grad_norm as norms
from graphpp.pipeline.cache_key import StepCall
from graphpp.pipeline.calls import Calls
from graphpp.pipeline.graph_cache import GraphCache, PreparedStep
from graphpp.pipeline.interfaces.methods import Interfaces
from graphpp.pipeline.outputs import OutputRanks, asked_with, eval_mode, require_output, shared_output, taken_output
from graphpp.pipeline.profile import Profile
from graphpp.pipeline.profile_steps import Trials
from graphpp.pipeline.read_batch import Batch, BatchReader, OneByOne
from graphpp.pipeline.results import EvalResult, StepMetrics, StepResult
from graphpp.pipeline.step_record import StepRecord
from graphpp.planner.microbatch_count import usual_microbatches
from graphpp.planner.plan import Plan
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.program import Input, StageProgram
from graphpp.runtime.recorder import Recorder

_PROFILE = one_of(Profile, takes="a graphpp.Profile, which pipe.profile returns")


class Pipeline(Interfaces):
    """A model cut into stages, ready to train; made by `graphpp.compile`, which documents the options."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        options: Options,
        place: RankPlace,
        agreement: Agreement,
        example: Microbatch | None = None,
    ) -> None:
        self._model, self._loss, self._options, self._place = model, loss, options, place
        self._request, self._record, self._state = CompileRequest(model, loss, options, place), StepRecord(), ModelState(model)
        for group in dict.fromkeys((place.group, place.model_parallel)):
            connect(group)  # the plan of bytes depends on how messages travel
        keep_freed_memory(place.device)
        self._cache = GraphCache(self._request, self._state, agreement)
        self._reader = BatchReader(self._request, example, self._cache.tables.admits)
        self._calls = Calls(self._request, agreement, self._cache, self._state, self._reader)
        if example is not None:
            with self._calls.watched():
                self._calls.compile(OneByOne([example]), usual_microbatches(options, place.ranks))

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_weight: LossWeight | None = None,
        scaler: GradScaler | None = None,
        accumulation_steps: int = 1,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of a whole batch, which every rank passes; gradients accumulate in `param.grad`.

        Tensors are cut into microbatches along the dimension named in `microbatches.batch_dims`, else along the first if it is
        the batch's; `graphpp.whole` exempts a tensor. If the rows do not divide evenly, the last microbatches are smaller. A
        batch with fewer rows than microbatches is cut into fewer, if the schedule has a table for that number.
        `loss_weight`: the factor of each microbatch's loss (one number each, or one for all), in place of the mean or sum.
        With (valid tokens of the microbatch) / (valid tokens of the batch) the loss is the mean over all tokens of the batch. A
        microbatch of weight 0 adds nothing, even if its loss is nan.
        `scaler`: its scale multiplies the gradients; an overflow on one rank makes every rank's scaler skip the step.
        `accumulation_steps`: gradients are divided by this number of steps between two optimizer steps.
        `loss_kwargs`: keyword arguments of the loss, whole for each microbatch, such as the number of the batch's tokens.
        Losses are reported unscaled and undivided. On return, the hooks of `register_post_accumulate_grad_hook` have been
        called, and the batch's memory may be overwritten.
        """
        batch = Microbatch(args, kwargs, target, whole_each(loss_kwargs))
        return self._step(batch, LossArguments(loss_weight, scaler, accumulation_steps))

    def recapture(self) -> None:
        """Capture the model anew at the next call: for a change that the pipeline cannot see, such as an environment variable.

        Call it on every rank; otherwise the next call raises `MismatchError` on all ranks.
        """
        self._cache.recapture()

    def eval(
        self,
        *args: Any,
        target: Any = None,
        loss_weight: LossWeight | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        output: OutputRanks = "last",
        **kwargs: Any,
    ) -> EvalResult:
        """The forward of a whole batch with the model in eval mode; computes no gradients and changes no training buffer.

        `output`: the rank of the last stage gets the output ("last"), or every rank ("all"). Tensors are joined along their
        batch dimension (`docs/training/shapes.md`), 0-dim floating tensors averaged over the microbatches, others stacked. With
        "each" every rank gets a list with the output of each microbatch, in which nothing is joined. Every rank
        gets `loss` if a target was given, the loss function needs none, or the output has its own `.loss`. `loss_weight` and
        `loss_kwargs` as in `step`.
        """
        batch = Microbatch(args, kwargs, target, whole_each(loss_kwargs))
        return self._evaluate(batch, LossArguments(loss_weight), output)

    def profile(self, *args: Any, target: Any = None, repeat: int = 3, **kwargs: Any) -> Profile:
        """Measure `repeat` steps over this batch on all ranks, after one warm-up step. Called by every rank.

        Every rank gets the same profile. Parameters, gradients, buffers and random state are restored. Raises `GraphPPError` if
        `repeat` is not positive.
        """
        batch = Microbatch(args, kwargs, target)
        with self._calls.watched():
            call, prepared = self._calls.prepare(batch, asked=f"a profile of {repeat} steps")
            require(GraphPPError, "repeat", COUNT, repeat)  # equal on all ranks
            step = partial(self._run_step, batch, NO_WEIGHTS)
            return Trials(self._model, self._cache, step, partial(self._calls.run, call)).profile(prepared, repeat)

    @checked(GraphPPError, folder=PATH, profile=or_none(_PROFILE))
    def report(
        self,
        folder: str | os.PathLike[str],
        profile: Profile | None = None,
        *,
        losses: Sequence[float] | None = None,
        seconds: Sequence[float] | None = None,
    ) -> Path:
        """Write the self-contained page `report.html` into a folder; returns its path. Called by every rank; rank 0 writes.

        `profile`: of this pipeline; None: times are estimated. `losses`, `seconds`: one per step of the run; None: the
        recorded ones. Raises `GraphPPError` before anything is captured, for a profile of another pipeline, and where
        the folder cannot be written.
        """
        from graphpp.pipeline.report_page import write_report  # loaded by the first page

        path, run = Path(folder).expanduser().resolve(), partial(self._record.view, losses, seconds)
        with self._calls.all_replicas("report"), self._calls.all_ranks("report"):
            return write_report(path, self._request, self._cache, profile, run)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the gradients of all ranks to a total norm of `max_norm`; returns the unclipped total norm, 0-dim.

        Called by every rank. Bit-equal to `torch.nn.utils.clip_grad_norm_` (same arguments) on the whole model. Raises
        `MismatchError` on all ranks if a rank makes another call, `GraphPPError` for a negative norm or order, and
        `RuntimeError` on all ranks for a non-finite total norm if `error_if_nonfinite`.
        """
        with self._calls.watched(), torch.no_grad(), profiled("grad_norm"):
            with self._calls.agreeing("clip_grad_norm_") as alike:
                require(GraphPPError, "foreach", or_none(FLAG), foreach)
                clipping, gradients = norms.read_clipping(max_norm, norm_type, error_if_nonfinite), self._gradients()
                alike["its arguments"] = [str(clipping)]
            with self._calls.exchanging():
                norm = norms.total_norm(gradients, clipping.norm_type)
        if clipping.error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the total norm of order {clipping.norm_type} of the gradients of all ranks is {float(norm)}, so nothing was "
                "clipped. To scale by it all the same, set error_if_nonfinite=False"
            )
        norms.clip_(gradients, clipping.max_norm, norm, foreach)
        self._calls.meter.clipped(norm)
        return norm

    @checked(GraphPPError, hook=FUNCTION, every=COUNT, actions=FLAG)
    def register_step_hook(
        self, hook: Callable[[StepMetrics], object], *, every: int = 1, actions: bool = False
    ) -> RemovableHandle:
        """Call `hook` with the `StepMetrics` of every `every`-th training step on this rank; any rank may register hooks.

        A hook gets a step's numbers when the next training call begins, with the gradient norm of a `clip_grad_norm_` in
        between, or when the handle is removed: use the handle as a context manager, so that the last step is not lost. The
        call waits until the device has ended the step of these numbers, not for later work. `actions`: with the times of the
        rank's actions; a step then waits for the device before it begins. If a hook raises, the call raises on all ranks, and
        nothing is run. Raises `GraphPPError` for arguments of other types.
        """
        return self._calls.meter.add(hook, every, actions)

    @property
    def bubble(self) -> float | None:
        """The share of the last call that this rank spent waiting for messages, 0 to 1; None before a call, and on CUDA."""
        last = self._calls.last
        return None if last is None else last.runner.bubble

    @property
    def cudagraphs(self) -> dict[str, str]:
        """Per program of this rank, by stage and phase: whether CUDA graphs replay it, or why not. Empty if not asked for."""
        return self._cache.recorded.states

    @property
    def steps(self) -> int:
        """The number of completed training calls, including those of a loaded checkpoint."""
        return self._calls.steps

    @property
    def plan(self) -> Plan:
        """The stages, their ranks and bytes, and the schedule. Raises `GraphPPError` before anything is captured."""
        return self._cache.captured().plan

    @checked(GraphPPError, stage=INTEGER)
    def programs(self, stage: int) -> StageProgram:
        """The programs of a stage of any rank, as compiled for the first captured microbatch.

        `programs(1).programs[Phase.FORWARD].source` is the text of stage 1's forward. Under backend="eager" the text runs, in
        another order if it has collectives to hide. Raises `GraphPPError` before anything is captured, and for a stage that
        does not exist.
        """
        stages = self._cache.captured().program.stages
        if not 0 <= stage < len(stages):
            raise GraphPPError(f"there is no stage {stage}: stages are 0..{len(stages) - 1}")
        return stages[stage]

    def inputs_needed(self) -> list[str]:
        """The paths of the batch tensors that this rank's stages read, in order: `args[0]`, `kwargs['mask']`, `target`.

        Every other tensor may be given as `graphpp.absent(shape, dtype)`. Raises `GraphPPError` before anything is captured:
        give `example=` to `graphpp.compile`.
        """
        first = self._cache.captured()
        read = first.reads(self._place.rank)
        return [role.path for role in first.captured.joint.inputs() if isinstance(role, Input) and role.path in read]

    def __repr__(self) -> str:
        """The plan as a table (stage, rank, FQNs, parameters, bytes sent, bytes saved), and how the latest batch was cut."""
        first = self._cache.first
        if first is None:
            return "Pipeline(nothing captured yet: give example=, or run a step)"
        return "\n".join(filter(None, (str(first.plan), self._reader.describe())))

    def _step(self, batch: Batch, weights: LossArguments, output: OutputRanks = "last") -> StepResult:
        with self._calls.watched(), profiled("step"):
            result, hooked = self._run_step(batch, weights, output=output)
            if hooked:
                call_gradient_hooks(parameter for fqn, parameter in self.named_parameters() if fqn in hooked)
            self._note(result)
        return result

    def _note(self, result: StepResult) -> None:
        self._calls.steps += 1
        self._record.add(result.loss)
        self._calls.meter.end(self._calls.steps, result.loss)

    def _run_step(
        self, batch: Batch, weights: LossArguments, recorder: Recorder | None = None, output: OutputRanks = "last"
    ) -> tuple[StepResult, Collection[str]]:
        with profiled("prepare"):
            call, prepared = self._calls.prepare(batch, weights, asked=asked_with("step", output))
        require_output(output, call, prepared, self._request.batch_dims, self._options.memory.outputs)
        runner = self._calls.run(call, prepared, recorder or self._calls.meter.ran(call, prepared)).runner
        with self._calls.exchanging(), profiled("losses"):
            losses, metrics = runner.losses(), runner.metrics()
            if weights.shares_overflow:
                norms.share_overflow_(self._gradients())
        found = self._output(call, prepared, output) if self._options.memory.outputs else None
        of_step = call.weighting
        return StepResult(of_step.step_loss(wide(losses)), losses, of_step.means(metrics), found, metrics), runner.hooked

    def _evaluate(self, batch: Batch, weights: LossArguments, output: OutputRanks) -> EvalResult:
        with self._calls.watched(), eval_mode(self._model):
            call, prepared = self._calls.prepare(batch, weights, training=False, asked=asked_with("eval", output))
            require_output(output, call, prepared, self._request.batch_dims)
            self._calls.run(call, prepared)
            runner = prepared.runner
            with self._calls.exchanging(training=False):
                losses = runner.losses() if runner.program.loss is not None else None
                metrics = runner.metrics()
            found = self._output(call, prepared, output)
        loss = None if losses is None else call.weighting.step_loss(wide(losses))
        return EvalResult(found, loss, losses, call.weighting.means(metrics), metrics)

    def _output(self, call: StepCall, prepared: PreparedStep, output: OutputRanks) -> Any:
        taken = taken_output(call, prepared, self._request.batch_dims, output)
        with self._calls.exchanging(call.training):
            return shared_output(taken, output, prepared.runner, self.is_last, self._calls.bytes_of_all)

    def _gradients(self) -> norms.RankGradients:
        owners = self._cache.ownership.ranks_of_parameter
        return norms.RankGradients.of(dict(self.named_parameters()), self._state.positions, owners, self._place)
