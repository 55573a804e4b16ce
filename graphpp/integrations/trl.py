"""TRL's SFTTrainer on a pipeline: `SFTTrainer(model, args, ..)` becomes `PipelineSFTTrainer(model, args, .., pipeline={..})`.

Contract: as `PipelineTrainer`, with TRL's data sets, collators and packing. The loss is the model's own cross entropy, which
TRL's `loss_type="nll"` computes too. TRL's numbers beside the loss (entropy, token accuracy, number of tokens) are not logged:
TRL computes them from values of tensors, which a captured loss does not have.
"""

from __future__ import annotations

from typing import Any

import transformers
from trl import SFTTrainer

from graphpp.integrations.refusals import refuse
from graphpp.integrations.transformers import PipelineMixin


class PipelineSFTTrainer(PipelineMixin, SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` with the argument `pipeline`: options of `graphpp.compile`."""

    compute_loss = transformers.Trainer.compute_loss

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        kind, offloads = getattr(args, "loss_type", "nll"), getattr(args, "activation_offloading", False)
        faults = {
            f"loss_type={kind!r}": "take 'nll', which the model's own loss is" if kind != "nll" else "",
            "activation_offloading=True": "give pipeline={'memory': graphpp.Memory(offload=True)}" * bool(offloads),
        }
        refuse("PipelineSFTTrainer", faults)
        super().__init__(model, args, *rest, **named)
