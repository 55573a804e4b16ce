"""TRL's SFTTrainer on a pipeline, with packing and LoRA: torchrun --nproc-per-node 2 examples/trl_sft.py OUT"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from text import corpus
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig

from graphpp.integrations.trl import (
    PipelineSFTTrainer as SFTTrainer,  # one process: from trl import SFTTrainer
)

set_seed(0)
torch.set_num_threads(1)
words = models.WordLevel({str(token): token for token in range(256)}, unk_token="0")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1")
text = corpus(4000).long()
rows = Dataset.from_list([{"input_ids": text[40 * at : 40 * at + 20 + at % 9].tolist()} for at in range(96)])
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
args = SFTConfig(
    sys.argv[1], per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=3, learning_rate=1e-2, max_length=64,
    packing=True, packing_strategy="wrapped", logging_steps=1, report_to="none", use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True, bf16=False, save_strategy="no", eval_strategy="steps", eval_steps=3,
)  # fmt: skip
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
data = {"train_dataset": rows, "eval_dataset": rows.select(range(8)), "processing_class": tokenizer, "peft_config": lora}
trainer = SFTTrainer(LlamaForCausalLM(config), args, **data, pipeline={"schedule": "1F1B"})  # one process: no pipeline=
trainer.train()
trainer.save_model(f"{sys.argv[1]}/final")
trainer.save_state()
