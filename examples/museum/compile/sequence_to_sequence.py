"""An encoder and a decoder, and `generate` afterwards.

https://github.com/pytorch/PiPPy/issues/715

The tracer returns a graph module in place of T5, so `generate()` is gone. The thread looks for a way to keep the model's own
methods.
"""

import torch
from museum import equal, gradients, show
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers import T5Config, T5ForConditionalGeneration

import graphpp

torch.manual_seed(0)
sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
model = T5ForConditionalGeneration(T5Config(vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0, **sizes))
tokens, labels = torch.randint(1, 50, (4, 10)), torch.randint(1, 50, (4, 6))
for part, target in zip(tokens.chunk(2), labels.chunk(2), strict=True):
    (model(input_ids=part, labels=target, use_cache=False).loss / 2).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    inputs = {"input_ids": tokens[:2], "labels": labels[:2], "use_cache": False}
    cut = pipeline(model, (), inputs, split_spec={"decoder": SplitPoint.BEGINNING})
    kept = hasattr(cut.split_gm, "generate")
    return "right: the traced model has `generate`" if kept else "the traced model has no `generate`"


def ours():
    model.zero_grad()
    pipe = graphpp.compile(model, split=["decoder"], microbatches=2)
    pipe.step(input_ids=tokens, labels=labels, use_cache=False)
    said = equal(gradients(model), expected, close=1e-6)
    written = model.eval().generate(tokens[:1], max_new_tokens=3, do_sample=False)
    assert written.shape[1] <= 4
    return f"{said}; `model.generate` runs between the steps, on one rank with all stages"


show(theirs, ours)
