"""torchtitan's trainer (0.2) and its llama3 debug model on a pipeline, on GPUs:

    torchrun --nproc-per-node 2 examples/torchtitan_train.py --model.name=bytes --parallelism.pipeline_parallel_degree=2
"""

import torch
from text import batch, corpus
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer, main

from graphpp.integrations.torchtitan import pipelining_fn


class Bytes(BaseDataLoader):
    """Windows of the text, other ones on each data rank."""

    def __init__(self, job_config, dp_rank, **_):
        self.data, self.training, self.at, self.rank = corpus(100_000), job_config.training, 0, dp_rank

    def __iter__(self):
        while True:
            self.at += 1
            tokens, labels = batch(self.data, 1000 * self.at + self.rank, self.training.local_batch_size, self.training.seq_len)
            yield {"input": tokens}, labels

    def state_dict(self):
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state):
        self.at = int(state["at"])


spec = get_train_spec()
spec.build_dataloader_fn, spec.build_tokenizer_fn = Bytes, None
spec.pipelining_fn = pipelining_fn  # torchtitan's own pipeline: leave this line out
register_train_spec("bytes", spec)
if __name__ == "__main__":
    main(Trainer)
