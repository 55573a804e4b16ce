"""TRL's SFTTrainer on a pipeline: `SFTTrainer(model, args, ..)` becomes `PipelineSFTTrainer(model, args, .., pipeline={..})`.

Contract: as `PipelineTrainer`, with TRL's data sets, collators and packing. The loss is the model's own cross entropy, which
TRL's `loss_type="nll"` computes too. TRL's numbers beside the loss (entropy, token accuracy, number of tokens) are not logged:
TRL computes them from values of tensors, which a captured loss does not have.
"""

from __future__ import annotations

from typing import Any

import transformers
from trl import SFTTrainer

from graphpp.errors import GraphPPError
from graphpp.integrations.transformers import PipelineMixin


class PipelineSFTTrainer(PipelineMixin, SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` with the argument `pipeline`: options of `graphpp.compile`."""

    compute_loss = transformers.Trainer.compute_loss

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
        super().__init__(model, args, *rest, **named)
        if self.args.loss_type != "nll":
            raise GraphPPError(
                f"loss_type={self.args.loss_type!r} does not go with PipelineSFTTrainer, whose loss is the model's own: "
                "take 'nll'"
            )
        if self.args.activation_offloading:
            raise GraphPPError(
                "activation_offloading=True does not go with PipelineSFTTrainer: give pipeline={'memory': "
                "graphpp.Memory(offload=...)} in its place"
            )
