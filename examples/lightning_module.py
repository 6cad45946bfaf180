"""A LightningModule trains on two ranks, each with half of its weights, like on one device.

python examples/lightning_module.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshfold.lightning import MeshfoldStrategy


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Denoiser(LightningModule):  # knows nothing of ranks
    def __init__(self):
        super().__init__()
        self.model, self.losses = Mlp(16), []

    def training_step(self, batch, index):
        (clean,) = batch
        loss = nn.functional.mse_loss(self.model(clean + 0.1), clean)
        self.losses.append(f"{loss:.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(**where):
    seed_everything(0, verbose=False)
    module, rows = Denoiser(), DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=64)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(accelerator="cpu", max_epochs=4, enable_checkpointing=False, **where, **quiet)
    trainer.fit(module, rows)
    return trainer, module


if __name__ == "__main__":  # the trainer starts the second process, which runs this file too
    trainer, split = train(devices=2, strategy=MeshfoldStrategy(parallel=dict(tensor=2)))
    _, whole = train(devices=1)
    if trainer.is_global_zero:
        for name, module in (("two devices", split), ("one device", whole)):
            held = sum(parameter.numel() for parameter in module.parameters())
            print(f"{name}: {held:,} parameters on the first, losses", *module.losses)
