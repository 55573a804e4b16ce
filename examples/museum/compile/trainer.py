"""Pipeline parallelism in the Trainer of transformers.

https://github.com/huggingface/transformers/issues/37129

The Trainer has no pipeline. The answer of the thread: write a loop of your own with DeepSpeed's API.
"""

import tempfile

import torch
from museum import equal, show
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from graphpp.integrations.transformers import PipelineTrainer

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
tokens = torch.randint(0, 50, (16, 12), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in tokens]


def trained(trainer, **options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        usual = {"output_dir": folder, "max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "save_strategy": "no"}
        settings = TrainingArguments(report_to=[], disable_tqdm=True, logging_strategy="no", seed=0, **usual)
        trainer(model=model, args=settings, train_dataset=rows, **options).train()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def theirs():
    words = [name for name in vars(TrainingArguments(output_dir="x", use_cpu=True)) if "pipeline" in name]
    return f"right: TrainingArguments has {words}" if words else "TrainingArguments of this version has no word for a pipeline"


def ours():
    found = trained(PipelineTrainer, pipeline={"split": ["model.layers.1"], "microbatches": 2})
    return f"parameters after 2 steps {equal(found, trained(Trainer), close=1e-5).replace('eager', 'the usual Trainer')}"


show(theirs, ours)
