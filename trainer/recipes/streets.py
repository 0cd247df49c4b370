"""Street scenes in the folder layout of Cityscapes: finds, reads and draws them.

    leftImg8bit/{train,val}/<city>/<name>_leftImg8bit.png             RGB
    gtFine/{train,val}/<city>/<name>_gtFine_labelIds.png              the 34 published classes
    gtFine/{train,val}/<city>/<name>_gtFine_labelTrainIds.png         the 19 evaluated; preferred

`draw_folder` writes a small folder of that layout, so that tests and the demo need no download:

    python -m trainer.recipes.streets /tmp/streets
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset

from halfstep.recipe import ConfigError, data_path

SHIFT_PIXELS = 2  # ERFNet's augmentation: mirroring, and displacement by up to two pixels
IGNORED = 255  # label of pixels that are not evaluated
# The 19 evaluated classes, in order of their training label: published label, name, colour. Source:
# labels.py of https://github.com/mcordts/cityscapesScripts
CLASSES = (
    (7, "road", (128, 64, 128)),
    (8, "sidewalk", (244, 35, 232)),
    (11, "building", (70, 70, 70)),
    (12, "wall", (102, 102, 156)),
    (13, "fence", (190, 153, 153)),
    (17, "pole", (153, 153, 153)),
    (19, "traffic light", (250, 170, 30)),
    (20, "traffic sign", (220, 220, 0)),
    (21, "vegetation", (107, 142, 35)),
    (22, "terrain", (152, 251, 152)),
    (23, "sky", (70, 130, 180)),
    (24, "person", (220, 20, 60)),
    (25, "rider", (255, 0, 0)),
    (26, "car", (0, 0, 142)),
    (27, "truck", (0, 0, 70)),
    (28, "bus", (0, 60, 100)),
    (31, "train", (0, 80, 100)),
    (32, "motorcycle", (0, 0, 230)),
    (33, "bicycle", (119, 11, 32)),
)
TRAIN_LABEL = np.full(256, IGNORED, np.uint8)  # of each published label
TRAIN_LABEL[[label for label, _, _ in CLASSES]] = np.arange(len(CLASSES))
COLOURS = np.zeros((256, 3), np.uint8)  # by training label; black if ignored
COLOURS[: len(CLASSES)] = [colour for _, _, colour in CLASSES]

DRAWN_SIZE = (128, 64)  # width, height: Cityscapes' 2048 × 1024, a sixteenth
DRAWN_IMAGES = {"train": 48, "val": 12}
EGO_VEHICLE = 1  # an ignored published label: the bonnet of the car with the camera

Pixels = NDArray[np.uint8]
Read = Callable[[Path, Path, tuple[int, int]], tuple[Pixels, Pixels]]


def find(folder: Path, split: str) -> list[tuple[Path, Path]]:
    """Return each image of a split with its labels, ordered by name.

    Raises ConfigError if there is none, or if an image has no labels.
    """
    images = sorted((folder / "leftImg8bit" / split).glob("*/*_leftImg8bit.png"))
    if not images:
        raise ConfigError(
            f"recipe.folder is {str(folder)!r}: it has no leftImg8bit/{split}/*/*_leftImg8bit.png"
        )
    return [(image, _labels_of(image, folder, split)) for image in images]


def read(image: Path, labels: Path, size: tuple[int, int]) -> tuple[Pixels, Pixels]:
    """Return an image (H, W, 3) and its training labels (H, W), resized to (width, height)."""
    for path in (image, labels):
        data_path(path, "recipe.folder")  # a link may lead anywhere
    with Image.open(image) as opened:
        pixels = np.asarray(opened.convert("RGB").resize(size, Image.Resampling.BILINEAR))
    with Image.open(labels) as opened:
        classes = np.asarray(opened.resize(size, Image.Resampling.NEAREST))
    return pixels, classes if labels.stem.endswith("labelTrainIds") else TRAIN_LABEL[classes]


class Streets(Dataset[tuple[Tensor, Tensor]]):
    """Images (3, H, W) and labels (H, W), both uint8, mirrored and displaced at random."""

    def __init__(self, files: list[tuple[Path, Path]], size: tuple[int, int], read: Read) -> None:
        """size: width and height.  read: a function like the one in this module."""
        self._files, self._size, self._read = files, size, read

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, classes = self._read(*self._files[index], self._size)
        image, labels = torch.tensor(pixels).permute(2, 0, 1), torch.tensor(classes)
        if torch.rand(()) < 0.5:
            image, labels = image.flip(2), labels.flip(1)
        image = F.pad(image, (SHIFT_PIXELS,) * 4)
        labels = F.pad(labels, (SHIFT_PIXELS,) * 4, value=IGNORED)
        down, right = torch.randint(0, 2 * SHIFT_PIXELS + 1, (2,)).tolist()
        width, height = self._size
        rows, columns = slice(down, down + height), slice(right, right + width)
        return image[:, rows, columns], labels[rows, columns]


def draw_folder(folder: Path) -> None:
    """Draw 48 streets for training and 12 for validation, the same ones each time."""
    random = np.random.default_rng(0)
    for split, count in DRAWN_IMAGES.items():
        for kind in ("leftImg8bit", "gtFine"):
            (folder / kind / split / "drawn").mkdir(parents=True)
        for index in range(count):
            image, labels = _draw(random)
            stem = f"{split}/drawn/drawn_{index:06}_000019"
            image.save(folder / f"leftImg8bit/{stem}_leftImg8bit.png")
            labels.save(folder / f"gtFine/{stem}_gtFine_labelIds.png")


def _labels_of(image: Path, folder: Path, split: str) -> Path:
    name = image.name.removesuffix("_leftImg8bit.png")
    place = folder / "gtFine" / split / image.parent.name
    for kind in ("labelTrainIds", "labelIds"):
        if (labels := place / f"{name}_gtFine_{kind}.png").is_file():
            return labels
    raise ConfigError(
        f"recipe.folder is {str(folder)!r}: {image.name} has neither "
        f"{place}/{name}_gtFine_labelTrainIds.png nor …_labelIds.png"
    )


def _draw(random: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Draw sky, buildings, trees, a road, cars and people, with noise and changing light."""
    width, height = DRAWN_SIZE
    image, labels = Image.new("RGB", DRAWN_SIZE), Image.new("L", DRAWN_SIZE)
    brushes = ImageDraw.Draw(image), ImageDraw.Draw(labels)
    published = {name: (label, colour) for label, name, colour in CLASSES}

    def paint(shape: str, corners: list[float], name: str) -> None:
        label, colour = published.get(name, (EGO_VEHICLE, (60, 60, 60)))
        shade = tuple(int(c) for c in np.clip(np.array(colour) + random.integers(-40, 40), 0, 255))
        for brush, fill in zip(brushes, (shade, label), strict=True):
            getattr(brush, shape)(corners, fill=fill)

    horizon = int(random.integers(height * 3 // 8, height // 2))
    paint("rectangle", [0, 0, width, horizon], "sky")
    for left in range(0, width, 16):
        paint("rectangle", [left, int(random.integers(2, horizon)), left + 16, horizon], "building")
    for x in random.integers(0, width, 3):
        paint("ellipse", [x - 6, horizon - 14, x + 6, horizon], "vegetation")
    paint("rectangle", [0, horizon, width, height], "sidewalk")
    centre = float(random.integers(width // 3, width * 2 // 3))
    paint("polygon", [centre - 8, horizon, centre + 8, horizon, width, height, 0, height], "road")
    for y in sorted(random.uniform(horizon + 4, height - 12, 2)):
        x, half = random.uniform(20, width - 20), (y - horizon) / 2 + 3
        paint("rectangle", [x - half, y - half, x + half, y + half / 2], "car")
    for x in random.integers(4, width - 4, 2):
        paint("rectangle", [x - 2, horizon - 3, x + 2, horizon + 11], "person")
    paint("rectangle", [0, height - 4, width, height], "ego vehicle")

    light, noise = random.uniform(0.6, 1.2), random.normal(0, 12, (height, width, 3))
    pixels = np.clip(np.asarray(image) * light + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels), labels


if __name__ == "__main__":
    draw_folder(Path(sys.argv[1]))
