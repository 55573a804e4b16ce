"""TRL's DPOTrainer on a pipeline, with a reference model: torchrun --nproc-per-node 2 examples/trl_dpo.py OUT"""

import copy
import sys

import torch
from datasets import Dataset
from text import corpus
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig

from graphpp.integrations.trl import (
    PipelineDPOTrainer as DPOTrainer,  # one process: from trl import DPOTrainer
)

set_seed(0)
torch.set_num_threads(1)
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{str(at): at for at in range(2, 256)}}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
text = corpus(4000).tolist()
words_at = [" ".join(map(str, text[8 * at : 8 * at + 8])) for at in range(48)]
triples = zip(words_at[::3], words_at[1::3], words_at[2::3], strict=True)
rows = Dataset.from_list([{"prompt": a, "chosen": f" {b} <eos>", "rejected": f" {c} <eos>"} for a, b, c in triples])
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
args = DPOConfig(
    sys.argv[1], per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, learning_rate=1e-2,
    logging_steps=1, report_to="none", use_cpu=not torch.cuda.is_available(), disable_tqdm=True, bf16=False,
    save_strategy="no", eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2,
)  # fmt: skip
model = LlamaForCausalLM(config)
data = {"train_dataset": rows, "eval_dataset": rows.select(range(4)), "processing_class": tokenizer}
own = {"ref_model": copy.deepcopy(model)}
trainer = DPOTrainer(model, args=args, **data, **own, pipeline={"schedule": "1F1B"})  # one process: no pipeline=
trainer.train()
trainer.save_model(f"{sys.argv[1]}/final")
trainer.save_state()
