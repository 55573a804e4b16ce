# trainer.py
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from graphpp.integrations.transformers import PipelineTrainer as Trainer

sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
text = torch.tensor(list(sums.encode()))
rows = [{"input_ids": text[400 * at : 400 * at + 20 + at % 9]} for at in range(96)]


def collate(batch):
    """Rows padded to the longest."""
    ids = [row["input_ids"] for row in batch]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(ids, batch_first=True, padding_value=-100)
    return {"input_ids": pad(ids, batch_first=True), "labels": labels, "attention_mask": (labels != -100).long()}

output, *resume = sys.argv[1:]
set_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
)
model = LlamaForCausalLM(config)
args = TrainingArguments(
    output,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,  # the microbatches of a step
    max_steps=40,
    learning_rate=3e-3,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    weight_decay=0.1,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=20,
    save_strategy="steps",
    save_steps=20,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
data = {"train_dataset": rows[:80], "eval_dataset": rows[80:], "data_collator": collate}
trainer = Trainer(model, args, **data, pipeline={"schedule": "1F1B"})
trainer.train(resume_from_checkpoint=bool(resume))
trainer.save_model(f"{output}/final")
