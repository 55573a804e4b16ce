"""A causal language model in transformers' Trainer, on a pipeline: torchrun --nproc-per-node 2 examples/hf_trainer.py OUT

Three lines differ from the script for one process: two have a comment, and the third is the launcher.
"""

import sys

import torch
from text import corpus
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from graphpp.integrations.transformers import (
    PipelineTrainer as Trainer,  # one process: from transformers import Trainer
)

output, *resume = sys.argv[1:]
set_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config)
text = corpus(8000).long()
rows = [{"input_ids": text[40 * at : 40 * at + 20 + at % 9]} for at in range(96)]


def collate(batch):
    """Rows padded to the longest."""
    ids = [row["input_ids"] for row in batch]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(ids, batch_first=True, padding_value=-100)
    return {"input_ids": pad(ids, batch_first=True), "labels": labels, "attention_mask": (labels != -100).long()}


args = TrainingArguments(
    output, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=4, learning_rate=1e-3, warmup_steps=2,
    lr_scheduler_type="cosine", weight_decay=0.1, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2,
    save_strategy="steps", report_to="none", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
)  # fmt: skip
data = {"train_dataset": rows[:80], "eval_dataset": rows[80:], "data_collator": collate}
trainer = Trainer(model, args, **data, pipeline={"schedule": "1F1B"})  # one process: no pipeline=
trainer.train(resume_from_checkpoint=bool(resume))
trainer.save_model(f"{output}/final")
