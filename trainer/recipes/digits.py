"""Handwritten digits: the 1797 real 8 × 8 images that scikit-learn ships, and a small MLP.

400 steps take seconds on a CPU. The default scale, 2^24, is far too large on purpose: the first
steps overflow and are skipped, the scale backs off to about 2^18, and from there it grows every
25 steps until it overflows again. So an fp16 run shows all that a loss scaler does.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from halfstep.recipe import Loss, Recipe, RecipeConfig, RunConfig
from trainer.recipes.handwritten import PIXEL_MAX, TRAIN_SIZE, load_digits


class DigitsConfig(RecipeConfig):
    """Settings of the digits classifier."""

    width: int = Field(
        128, ge=1, le=8192, title="Width", description="Units in each of the two hidden layers."
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, title="Dropout", description="Share of hidden units dropped in training."
    )
    weight_decay: float = Field(
        0.01, ge=0, title="Weight decay", description="AdamW's decoupled weight decay."
    )
    shift_pixels: int = Field(
        0,
        ge=0,
        le=3,
        title="Shift",
        description="Shift each training image at random by up to this many pixels.",
    )


class Digits(Recipe):
    """Two hidden layers, cross-entropy, AdamW."""

    name: ClassVar = "digits"
    title: ClassVar = "Handwritten digits"
    description: ClassVar = "Classifies 8 × 8 images of digits; takes seconds on a CPU."
    Config: ClassVar = DigitsConfig
    defaults: ClassVar = {
        "training": {"steps": 400},
        "scaler": {"init_scale": 2.0**24, "growth_interval": 25},
        "evaluation": {"every_steps": 100},
    }

    def __init__(self, config: RunConfig[DigitsConfig], device: torch.device) -> None:
        settings = config.recipe
        self.device = device
        self.shift_pixels = settings.shift_pixels

        images, labels = load_digits()
        images, labels = images.to(device) / PIXEL_MAX, labels.to(device)
        self.train_images, self.val_images = images[:TRAIN_SIZE], images[TRAIN_SIZE:]
        self.train_labels, self.val_labels = labels[:TRAIN_SIZE], labels[TRAIN_SIZE:]
        self.train_size = TRAIN_SIZE

        width, dropout = settings.width, settings.dropout
        model = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 10),
        ).to(device)
        self.modules = {"model": model}
        self.optimizers = {
            "adamw": torch.optim.AdamW(
                model.parameters(),
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                fused=config.training.fused,
            )
        }

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images (B, 64) in 0…1 and labels (B,)."""
        on_device = indices.to(self.device, non_blocking=True)
        images, labels = self.train_images[on_device], self.train_labels[on_device]
        if self.shift_pixels:
            images = self._shift(images, generator)
        return images, labels

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the cross-entropy; under autocast it is computed in fp32."""
        images, labels = batch
        logits = self.modules["model"](images)  # (B, 10)
        yield Loss(F.cross_entropy(logits, labels), optimizer="adamw")

    def evaluate(self) -> dict[str, float]:
        """Return loss and accuracy on the 360 validation images."""
        logits = self.modules["model"](self.val_images)
        correct = logits.argmax(dim=1) == self.val_labels
        return {
            "val/loss": F.cross_entropy(logits, self.val_labels).item(),
            "val/accuracy": correct.float().mean().item(),
        }

    def _shift(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Move each image by a random whole number of pixels; zeros come in at the edge."""
        reach = self.shift_pixels
        size, count = 8 + 2 * reach, len(images)
        # (2, B, 8): the rows and the columns of the padded image that each result is cut from
        corner = torch.randint(0, 2 * reach + 1, (2, count, 1), generator=generator)
        rows, columns = (corner + torch.arange(8)).to(self.device, non_blocking=True)
        padded = F.pad(images.view(count, 8, 8), (reach,) * 4).view(count, size * size)
        pixels = rows[:, :, None] * size + columns[:, None, :]  # (B, 8, 8)
        return padded.gather(1, pixels.view(count, 64))
