"""Classify images: a ResNet on any class folders, in the layout of torchvision's ImageFolder.

Without a folder it uses the handwritten digits, as PNG files; on a CPU in minutes, in fp32. On
ImageNet:

    halfstep recipe train images --set recipe.folder=/data/imagenet \\
        --set recipe.network=resnet50 --set recipe.size=224 --set recipe.crop_area=0.08 \\
        --set recipe.mirror=true --set recipe.mixup=0.2 --set recipe.label_smoothing=0.1 \\
        --set training.batch_size=256 --set training.epochs=90 --set recipe.learning_rate=0.1 \\
        --set training.ema_decay=0.9999 --set evaluation.every_steps=5000 --set data.workers=12

Requires torchvision: pip install 'halfstep-service[images]'.

Shapes: B images in a batch, S × S pixels, K classes.
Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchvision import models
from torchvision.transforms import v2

from halfstep.recipe import Loss, Recipe, RecipeConfig, RunConfig, data_path
from halfstep.watching.flops import count_flops
from trainer.recipes.class_folders import LabelledImages, find
from trainer.recipes.digit_files import digit_folder
from trainer.recipes.mixup import draw_share, mix, mix_cross_entropy
from trainer.recipes.top_k import hits

NETWORKS = {"resnet18": models.resnet18, "resnet50": models.resnet50}
MARGIN = 8 / 7  # validation images are resized to this multiple of the size, then cropped
READERS = 8  # threads in an evaluation; decoding releases Python's lock
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, by channel


class ImagesConfig(RecipeConfig):
    """The images, the network, and its regularisation."""

    learning_rate: float = Field(
        0.02, gt=0, le=1e6, title="Learning rate", description="Peak learning rate of SGD."
    )
    folder: str = Field(
        "",
        title="Folder",
        description="A folder on the worker with a folder of images per class, or with such "
        "folders in train and val; without val, every tenth image is used for validation. Empty: "
        "handwritten digits, written to the worker as PNG files.",
    )
    network: Literal["resnet18", "resnet50"] = Field(
        "resnet18", title="Network", description="11 or 24 million parameters, not pretrained."
    )
    size: int = Field(
        32,
        ge=32,
        le=1024,
        title="Size",
        description="Side length in pixels; usual for ImageNet: 224.",
    )
    crop_area: float = Field(
        0.7,
        gt=0,
        le=1,
        title="Smallest crop",
        description="Training images are random crops with at least this share of the original's "
        "area. Usual for ImageNet: 0.08; 1: no crop.",
    )
    mirror: bool = Field(
        False,
        title="Mirror",
        description="Mirror training images with a probability of 0.5. Not for digits and letters.",
    )
    rand_augment: bool = Field(
        False,
        title="RandAugment",
        description="Also apply two random changes of colour or geometry.",
    )
    mixup: float = Field(
        0.0,
        ge=0,
        le=10,
        title="Mixup",
        description="MixUp: blend pairs of images with a weight from Beta(α, α), such as 0.2. 0: "
        "none.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        title="Label smoothing",
        description="Share of the label that is spread over all classes, such as 0.1.",
    )
    momentum: float = Field(0.9, ge=0, lt=1, title="Momentum", description="SGD's, Nesterov's way.")
    weight_decay: float = Field(
        5e-5,
        ge=0,
        le=1,
        title="Weight decay",
        description="Weight decay of matrices; biases and norms have none.",
    )


class Images(Recipe):
    """A ResNet, cross-entropy, SGD with momentum."""

    name: ClassVar = "images"
    title: ClassVar = "Images in folders"
    description: ClassVar = (
        "A ResNet for any folder of image classes; by default digits as PNG files."
    )
    Config: ClassVar = ImagesConfig
    defaults: ClassVar = {
        "training": {
            "steps": 300,
            "batch_size": 32,
            "schedule": "cosine",
            "warmup_steps": 20,
            "channels_last": True,
        },
        "evaluation": {"every_steps": 100},
    }

    def __init__(self, config: RunConfig[ImagesConfig], device: torch.device) -> None:
        settings = config.recipe
        self.device, self.settings = device, settings
        self.batch_size = config.training.batch_size

        folder = data_path(settings.folder, "recipe.folder") if settings.folder else digit_folder()
        train, self.val_images = find(folder)
        self.classes = train.classes
        self.dataset = LabelledImages(train, augmentation(settings))
        self.validation = LabelledImages(self.val_images, middle(settings.size))

        model = NETWORKS[settings.network](num_classes=len(self.classes)).to(device)
        self.modules = {"model": model}
        self.mean = torch.tensor(MEAN, device=device).view(3, 1, 1) * 255
        self.deviation = torch.tensor(DEVIATION, device=device).view(3, 1, 1) * 255
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        self.optimizers = {
            "sgd": torch.optim.SGD(
                [
                    {"params": matrices, "weight_decay": settings.weight_decay},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                lr=settings.learning_rate,
                momentum=settings.momentum,
                nesterov=settings.momentum > 0,
                fused=config.training.fused,
            )
        }

    def collate(self, examples: list[object]) -> tuple[Tensor, Tensor, Tensor]:
        """Return images (B, 3, S, S) in uint8, labels (B,), and mixup's share for all of them."""
        images, labels = default_collate(examples)
        return images, labels, draw_share(self.settings.mixup)

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the cross-entropy, computed in fp32 by autocast."""
        images, labels, share = batch
        inputs = self._normalize(images)
        smoothing = self.settings.label_smoothing
        if self.settings.mixup:
            logits = self.modules["model"](mix(inputs, share))  # (B, K)
            loss = mix_cross_entropy(logits, labels, share, smoothing)
        else:
            logits = self.modules["model"](inputs)
            loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        yield Loss(loss, optimizer="sgd")

    def flops(self) -> float:
        """Count the operations of one image."""
        size = self.settings.size
        with torch.device("meta"):
            model: nn.Module = NETWORKS[self.settings.network](num_classes=len(self.classes))
            # Two, because a BatchNorm over 1 × 1 pixels has no variance with one image.
            images, labels = torch.empty(2, 3, size, size), torch.zeros(2, dtype=torch.int64)
        return count_flops(lambda: F.cross_entropy(model(images), labels)) / 2

    def evaluate(self) -> dict[str, float]:
        """Return loss, top-1 and top-5 on all validation images."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # sums over images
        for images, labels in self._validation_batches():
            on_device = labels.to(self.device)
            logits = self.modules["model"](self._normalize(images.to(self.device)))
            loss = F.cross_entropy(logits, on_device, reduction="sum")
            sums += torch.stack([loss, *(hits(logits, on_device, k) for k in (1, 5))])
        loss, top1, top5 = (sums / len(self.validation)).tolist()
        return {"val/loss": loss, "val/top1": top1, "val/top5": top5}

    def artifacts(self) -> dict[str, bytes | str]:
        """Return the names of the classes, in the order of the network's outputs."""
        return {"classes.txt": "\n".join(self.classes) + "\n"}

    def _normalize(self, images: Tensor) -> Tensor:
        """Return images in fp32, converted on the device."""
        return (images.float() - self.mean) / self.deviation

    def _validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches, and read one batch ahead."""
        with ThreadPoolExecutor(READERS) as readers:
            ahead = None
            for first in range(0, len(self.validation), self.batch_size):
                indices = range(first, min(first + self.batch_size, len(self.validation)))
                read = readers.map(self.validation.__getitem__, indices)
                if ahead is not None:
                    yield default_collate(list(ahead))
                ahead = read
            if ahead is not None:
                yield default_collate(list(ahead))


def augmentation(settings: ImagesConfig) -> v2.Transform:
    """Return the transform from an image to a training image, (3, S, S) in uint8."""
    side = settings.size, settings.size
    steps: list[nn.Module] = [v2.Resize(side)]
    if settings.crop_area < 1:
        steps = [v2.RandomResizedCrop(side, scale=(settings.crop_area, 1))]
    if settings.mirror:
        steps.append(v2.RandomHorizontalFlip())
    if settings.rand_augment:
        steps.append(v2.RandAugment())
    return v2.Compose([*steps, v2.PILToTensor()])


def middle(size: int) -> v2.Transform:
    """Return the transform to a validation image: resized in proportion, centre-cropped."""
    return v2.Compose([v2.Resize(round(size * MARGIN)), v2.CenterCrop(size), v2.PILToTensor()])
