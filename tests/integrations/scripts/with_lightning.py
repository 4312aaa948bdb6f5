"""A script of Lightning, driven by flags. It knows nothing of zero_ext."""

import argparse

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(13, 1083), nn.Tanh(), nn.Linear(1083, 7))

    def training_step(self, batch, number):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(flags: argparse.Namespace) -> Classifier:
    module = Classifier()
    x = torch.randn(64, 13, generator=torch.Generator().manual_seed(7))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=flags.devices,
        strategy=flags.strategy,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, torch.arange(64) % 7), batch_size=3))
    return module


parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--devices", type=int, default=2)
losses: list[float] = []
if __name__ == "__main__":
    model = main(parser.parse_args())
    optimizer = model.trainer.optimizers[0]
    print("losses", losses)
