"""A Lightning fit in fp16, watched by one callback. Needs lightning and scikit-learn.

python examples/lightning_digits.py --epochs 2 --lr 1e-3
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep.lightning


class Digits(pl.LightningModule):
    """A perceptron on images of 8 by 8."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        """Return the mean cross-entropy."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the one."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    """Fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--scale", type=float, default=2.0**24, help="where the loss scale begins")
    args = parser.parse_args()

    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Said at length: on a CPU, "16-mixed" means bf16 to Lightning.
    scaler = torch.amp.GradScaler(device, init_scale=args.scale)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator=device,
        devices=1,
        plugins=[MixedPrecision("16-mixed", device, scaler=scaler)],
        callbacks=[halfstep.lightning.Watch()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Digits(args.lr), DataLoader(data, batch_size=64, shuffle=True))


if __name__ == "__main__":
    main()
