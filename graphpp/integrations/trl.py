"""TRL's trainers on a pipeline: `SFTTrainer(model, args, ..)` becomes `PipelineSFTTrainer(model, args, .., pipeline={..})`.

Contract: as `PipelineTrainer`, with TRL's data sets, collators, packing, losses and metrics.

DPO: the log-probabilities of the reference are inputs of the training step, as with TRL's `precompute_ref_log_probs`. They come
from a second pipeline, of `ref_model`, or without one from the training's pipeline with other adapters. All microbatches of a
step pass through the reference before the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from trl import DPOTrainer, SFTTrainer
from trl.kernels import chunked_logprob
from trl.trainer import utils
from trl.trainer.utils import use_adapter

import graphpp
from graphpp.integrations.refusals import refuse
from graphpp.integrations.stand_in import StandIn, answering, call_of, rows_of, tensors_with_rows
from graphpp.integrations.transformers import PipelineMixin

_OFFLOADING = "give pipeline={'memory': graphpp.Memory(offload=True)}"
_NOT_SYNCED = "leave it out, for the ranks of the reference hold other parameters than those of the model"


def _faults(args: Any) -> dict[str, str]:
    return {"activation_offloading=True": _OFFLOADING * bool(getattr(args, "activation_offloading", False))}


def _let_capture() -> None:
    """Let a capture follow TRL's fused LM head, for any number of tokens. Outside of captures TRL computes as before.

    On the CPU log-probabilities keep their bits. On a GPU operators of torch replace Triton kernels, which no capture follows;
    results are equal up to rounding.
    """
    modules: tuple[Any, ...] = (chunked_logprob, utils)
    for module in modules:
        module._use_triton = _triton_outside_captures
    modules[0].range, modules[0].min = _chunks, _smaller


_use_triton = chunked_logprob._use_triton


def _triton_outside_captures(device: Any) -> bool:
    captured = type(torch.empty(0)) is not torch.Tensor  # a capture makes tensors without data
    return not captured and _use_triton(device)


def _chunks(start: int, stop: Any, step: int) -> Sequence[int]:
    """As `range`; for a number that varies between microbatches, the captured graph is for this number of chunks."""
    if not isinstance(stop, torch.SymInt):
        return range(start, stop, step)
    found = [start]
    while found[-1] + step < stop:
        found.append(found[-1] + step)
    return found


def _smaller(one: Any, other: Any) -> Any:
    """As `min`, which a trace would keep as an expression."""
    return one if one <= other else other


_let_capture()


class PipelineSFTTrainer(PipelineMixin, SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` with the argument `pipeline`: options of `graphpp.compile`."""

    reads_values = True

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        refuse("PipelineSFTTrainer", _faults(args))
        super().__init__(model, args, *rest, **named)

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        """TRL's; that of Trainer, without metrics, for losses of logits, which TRL computes in a second forward."""
        of_logits = self.compute_loss_func is not None or self.label_smoother is not None
        return (transformers.Trainer.compute_loss if of_logits else SFTTrainer.compute_loss)(self, *args, **named)


class PipelineDPOTrainer(PipelineMixin, DPOTrainer):  # type: ignore[misc]
    """`trl.DPOTrainer` with the argument `pipeline`: options of `graphpp.compile`, also for the reference model."""

    reads_values = True
    precompute_ref_logps: bool
    _reference_pipe: graphpp.Pipeline | None = None

    def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        synced = bool(getattr(args, "sync_ref_model", False))
        refuse("PipelineDPOTrainer", {**_faults(args), "sync_ref_model=True": _NOT_SYNCED * synced})
        super().__init__(model, ref_model, args, *rest, **named)

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        """TRL's, with the reference's log-probabilities among the inputs."""
        precomputes, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            return super().compute_loss(*args, **named)
        finally:
            self.precompute_ref_logps = precomputes

    def prediction_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        self._pipe_for(inputs)
        (inputs,) = self._completed([self._prepare_inputs(inputs)])
        return super().prediction_step(model, inputs, *rest, **named)

    def _cut(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Microbatches of whole pairs: a batch has the chosen rows first, then the rejected rows in the same order."""
        if self._pieces == 1:
            return [inputs]
        rows, cut = rows_of(inputs), super()._cut
        of_rows = {key: value.chunk(2) for key, value in tensors_with_rows(inputs).items() if len(value) == rows}
        halves = [cut({**inputs, **{key: value[at] for key, value in of_rows.items()}}) for at in (0, 1)]
        return [{**one, **{key: torch.cat([one[key], two[key]]) for key in of_rows}} for one, two in zip(*halves, strict=True)]

    def _example(self, inputs: dict[str, Any]) -> dict[str, Any]:
        part = super()._example(inputs)
        zeros = torch.zeros(rows_of(part) // 2, device=self.args.device)
        missing = [name for name in ("ref_chosen_logps", "ref_rejected_logps") if name not in part]
        return {**part, **{name: zeros.clone() for name in missing}}  # in the order of _completed: another is another capture

    def _completed(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if all("ref_chosen_logps" in part for part in parts):
            return parts
        calls = [self._reference_call(part) for part in parts]
        found = []
        for part, output in zip(parts, self._refer(calls), strict=True):
            model = answering(self.ref_model or self.model, output, "compute_ref_log_probs")
            chosen, rejected = super().compute_ref_log_probs(model, part)
            found.append({**part, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected})
        return found

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """TRL's, for `precompute_ref_log_probs`. Each rank computes alone until there is a pipeline: it has the whole model."""
        if self.ref_model is None and self.pipe is None:
            return super().compute_ref_log_probs(model, inputs)
        refer = lambda *args, **kwargs: self._refer([graphpp.Microbatch(args, kwargs)])[0]  # noqa: E731
        return super().compute_ref_log_probs(StandIn(model, refer), inputs)

    def _reference_call(self, part: dict[str, Any]) -> graphpp.Microbatch:
        log_probs = super().compute_ref_log_probs
        model = self.ref_model or self.model
        return graphpp.Microbatch(*call_of(model, "compute_ref_log_probs", lambda model: log_probs(model, part)))

    def _refer(self, calls: list[graphpp.Microbatch]) -> list[Any]:
        """The output of the reference for each call."""
        with self.accelerator.autocast(), torch.no_grad(), self._as_reference() as pipe:
            outputs: list[Any] = pipe.eval_microbatches(calls, output="each").output
        return outputs

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[graphpp.Pipeline]:
        """A context in which a pipeline computes the reference."""
        if self.ref_model is None:
            pipe = self._required()
            peft = getattr(self.model, "peft_config", {})
            with use_adapter(self.model, "ref" if "ref" in peft else None) if peft else contextlib.nullcontext():
                yield pipe
            return
        if self._reference_pipe is None:
            options = {"parallel": self.args.device, **self.pipeline_options}
            self._reference_pipe = graphpp.compile(self.ref_model, **options)
        yield self._reference_pipe
