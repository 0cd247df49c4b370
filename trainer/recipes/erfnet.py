"""ERFNet: semantic segmentation of street scenes in Cityscapes' layout, in real time.

Without a folder it uses small street scenes that it draws, a minute on a CPU. On Cityscapes:

    halfstep recipe train erfnet --set recipe.folder=/data/cityscapes \\
        --set recipe.height=512 --set recipe.width=1024 --set recipe.channels=16 \\
        --set training.batch_size=6 --set training.steps=70000 --set evaluation.every_steps=2500

An epoch there has 496 steps, so 2,500 steps are five epochs: 28 evaluations of 500 images. The
default interval is for the small scenes.

Its building block replaces a 3 × 3 convolution by a 3 × 1 and a 1 × 3 one, twice, with a
residual connection: a third fewer weights, and one more non-linearity.

Shapes: B images in a batch, C channels, H × W pixels, K = 19 classes.
Source: Romera et al., "ERFNet", IEEE Transactions on Intelligent Transportation Systems, 2018.
"""

import io
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from halfstep.recipe import ConfigError, Loss, Recipe, RecipeConfig, RunConfig, data_path
from trainer.recipes import streets

REDUCTION = 8  # the encoder halves the image three times
READERS = 8  # threads in an evaluation; decoding a PNG releases Python's lock
NORM_EPSILON = 1e-3  # the paper's; 1e-5 lets a flat channel's fp16 noise grow 300-fold


class ERFNetConfig(RecipeConfig):
    """Sizes of the network and of the images."""

    learning_rate: float = Field(
        5e-3, gt=0, title="Learning rate", description="Peak learning rate of AdamW."
    )
    folder: str = Field(
        "",
        title="Folder",
        description="A folder on the worker with Cityscapes' leftImg8bit and gtFine. Empty: small "
        "generated streets. With many images, set the evaluation interval to some thousand steps.",
    )
    height: int = Field(64, ge=8, le=4096, title="Height", description="Pixels; a multiple of 8.")
    width: int = Field(128, ge=8, le=8192, title="Width", description="Pixels; a multiple of 8.")
    channels: int = Field(
        8,
        ge=4,
        le=256,
        title="Channels",
        description="Channels at half resolution; later stages have 4 and 8 times as many. ERFNet: "
        "16.",
    )
    blocks: int = Field(
        5,
        ge=1,
        le=50,
        title="Blocks",
        description="Blocks at a quarter of the resolution. ERFNet: 5.",
    )
    dilations: int = Field(
        2,
        ge=0,
        le=20,
        title="Dilated rounds",
        description="Groups of four blocks with dilation 2, 4, 8 and 16. ERFNet: 2.",
    )
    dropout: float = Field(
        0.3, ge=0, lt=1, title="Dropout", description="Share of channels dropped in dilated blocks."
    )
    weight_decay: float = Field(
        1e-4, ge=0, title="Weight decay", description="AdamW's decoupled weight decay."
    )
    kept_images: int = Field(
        1000,
        ge=0,
        title="Images kept",
        description="Decoded images that each process, data workers included, caches in host "
        "memory: 4 bytes per pixel.",
    )


class ERFNet(Recipe):
    """One encoder, one decoder, cross-entropy over pixels, AdamW."""

    name: ClassVar = "erfnet"
    title: ClassVar = "Street scenes"
    description: ClassVar = (
        "ERFNet for semantic segmentation of streets, on Cityscapes or generated images."
    )
    Config: ClassVar = ERFNetConfig
    defaults: ClassVar = {
        "training": {"steps": 200, "batch_size": 6, "schedule": "cosine"},
        "evaluation": {"every_steps": 50},
    }

    def __init__(self, config: RunConfig[ERFNetConfig], device: torch.device) -> None:
        settings = config.recipe
        for field in ("height", "width"):
            if (value := getattr(settings, field)) % REDUCTION:
                raise ConfigError(f"recipe.{field} is {value}: use a multiple of {REDUCTION}")
        self.device = device
        self.batch_size = config.training.batch_size
        self.size = settings.width, settings.height

        own = settings.folder
        folder = data_path(own, "recipe.folder") if own else self._drawn_folder()
        self._read = lru_cache(settings.kept_images)(streets.read)
        self.dataset = streets.Streets(streets.find(folder, "train"), self.size, self._read)
        self.val_files = streets.find(folder, "val")

        model = Network(settings).to(device)
        self.modules = {"model": model}
        self.optimizers = {
            "adamw": torch.optim.AdamW(
                model.parameters(),
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                fused=config.training.fused,
            )
        }

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the mean cross-entropy of the pixels that count."""
        images, labels = _for_the_network(*batch)
        yield Loss(_cross_entropy(self.modules["model"](images), labels), optimizer="adamw")

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the mean, over the classes that occur, of intersection over union."""
        classes = len(streets.CLASSES)
        confusion = torch.zeros(classes * classes, dtype=torch.int64, device=self.device)
        loss = torch.zeros((), device=self.device)  # sum over the evaluated pixels
        for first in range(0, len(self.val_files), self.batch_size):
            files = self.val_files[first : first + self.batch_size]
            images, labels = self._on_device(*self._load(files))
            logits = self.modules["model"](images)
            loss += _cross_entropy(logits, labels, reduction="sum")
            counts = labels != streets.IGNORED
            pairs = labels[counts] * classes + logits.argmax(dim=1)[counts]
            confusion += torch.bincount(pairs, minlength=classes * classes)
        return {
            "val/loss": (loss / confusion.sum()).item(),
            "val/mean_iou": mean_iou(confusion.view(classes, classes)),
        }

    def artifacts(self) -> dict[str, bytes | str]:
        """Return the first validation image, with prediction and labels below it."""
        pixels, labels = self._read(*self.val_files[0], self.size)
        images, _ = self._on_device(*self._load([self.val_files[0]]))
        predicted = self.modules["model"](images).argmax(dim=1)[0].cpu().numpy()
        rows = [pixels, streets.COLOURS[predicted], streets.COLOURS[labels]]
        file = io.BytesIO()
        Image.fromarray(np.concatenate(rows)).save(file, "PNG")
        return {"prediction.png": file.getvalue()}

    def _drawn_folder(self) -> Path:
        folder = tempfile.mkdtemp(prefix="halfstep-streets-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        streets.draw_folder(Path(folder))
        return Path(folder)

    def _load(self, files: list[tuple[Path, Path]]) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, H, W) and labels (B, H, W), both uint8 on the host."""
        with ThreadPoolExecutor(READERS) as readers:
            read = list(readers.map(lambda pair: self._read(*pair, self.size), files))
        images = torch.from_numpy(np.stack([image for image, _ in read])).permute(0, 3, 1, 2)
        return images.contiguous(), torch.from_numpy(np.stack([labels for _, labels in read]))

    def _on_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return _for_the_network(images.to(self.device), labels.to(self.device))


class Network(nn.Module):
    """The encoder, to an eighth of the size, and the decoder, back to the full size."""

    def __init__(self, settings: ERFNetConfig) -> None:
        super().__init__()
        small, middle, large = (settings.channels * factor for factor in (1, 4, 8))
        self.encoder = nn.Sequential(
            Downsampler(3, small),
            Downsampler(small, middle),
            *(Block(middle, dropout=settings.dropout / 10) for _ in range(settings.blocks)),
            Downsampler(middle, large),
            *(
                Block(large, dilation, settings.dropout)
                for _ in range(settings.dilations)
                for dilation in (2, 4, 8, 16)
            ),
        )
        self.decoder = nn.Sequential(
            Upsampler(large, middle),
            Block(middle),
            Block(middle),
            Upsampler(middle, small),
            Block(small),
            Block(small),
            nn.ConvTranspose2d(small, len(streets.CLASSES), 2, stride=2),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K, H, W) of images (B, 3, H, W)."""
        logits: Tensor = self.decoder(self.encoder(images))
        return logits


class Downsampler(nn.Module):
    """Halve the size: convolution and max pooling in parallel, (B, C, H, W) → (B, C', H/2, W/2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs - inputs, 3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.norm = nn.BatchNorm2d(outputs, eps=NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C', H/2, W/2)."""
        return F.relu(self.norm(torch.cat([self.convolution(x), self.pool(x)], dim=1)))


class Upsampler(nn.Module):
    """Twice the size, by a transposed convolution: (B, C, H, W) → (B, C', 2H, 2W)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.ConvTranspose2d(
            inputs, outputs, 3, stride=2, padding=1, output_padding=1
        )
        self.norm = nn.BatchNorm2d(outputs, eps=NORM_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C', 2H, 2W)."""
        return F.relu(self.norm(self.convolution(x)))


class Block(nn.Module):
    """The paper's non-bottleneck-1D: 3 × 1, 1 × 3, 3 × 1, 1 × 3, with a residual connection."""

    def __init__(self, channels: int, dilation: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.column_1 = nn.Conv2d(channels, channels, (3, 1), padding=(1, 0))
        self.row_1 = nn.Conv2d(channels, channels, (1, 3), padding=(0, 1))
        self.norm_1 = nn.BatchNorm2d(channels, eps=NORM_EPSILON)
        self.column_2 = nn.Conv2d(
            channels, channels, (3, 1), padding=(dilation, 0), dilation=(dilation, 1)
        )
        self.row_2 = nn.Conv2d(
            channels, channels, (1, 3), padding=(0, dilation), dilation=(1, dilation)
        )
        self.norm_2 = nn.BatchNorm2d(channels, eps=NORM_EPSILON)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W)."""
        y = F.relu(self.norm_1(self.row_1(F.relu(self.column_1(x)))))
        y = self.norm_2(self.row_2(F.relu(self.column_2(y))))
        return F.relu(self.dropout(y) + x)


def _for_the_network(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images in 0…1 and labels as indices, converted on the device."""
    return images.float() / 255, labels.long()


def mean_iou(confusion: Tensor) -> float:
    """Return the mean intersection over union of the classes that are true or predicted somewhere.

    confusion: (K, K) pixels, true class by predicted class.
    """
    hits = confusion.diagonal()
    union = confusion.sum(dim=0) + confusion.sum(dim=1) - hits
    occurs = union > 0
    return (hits[occurs] / union[occurs]).mean().item()


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    # Pixels as rows, (B·H·W, K): the loss of images, "NLLLoss2d", has no deterministic kernel.
    rows = logits.permute(0, 2, 3, 1).flatten(0, 2)
    flat = labels.flatten()
    return F.cross_entropy(rows, flat, ignore_index=streets.IGNORED, reduction=reduction)
