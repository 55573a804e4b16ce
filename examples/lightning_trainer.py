"""Lightning's Trainer on a pipeline: `python lightning_trainer.py FOLDER PROCESSES [EPOCHS] [CHECKPOINT]`."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from graphpp.integrations.lightning import PipelineStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 3))

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


if __name__ == "__main__":
    folder, processes, epochs, resume, *_ = *sys.argv[1:], *[None] * 2
    pl.seed_everything(0)
    x = torch.randn(64, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())
    ways = {"strategy": PipelineStrategy(schedule="1F1B", microbatches=4), "devices": int(processes)}
    usual = {"max_epochs": int(epochs or 3), "default_root_dir": folder, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", **usual, **ways)
    trainer.fit(Classifier(), DataLoader(data, 16), DataLoader(data, 16), ckpt_path=resume)
