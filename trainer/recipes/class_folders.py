"""Images in class folders, in the layout of torchvision's ImageFolder.

    train/<class>/…/<name>.jpg
    val/<class>/…/<name>.jpg         or only classes: then every tenth image of each validates

An image is opened when it is read. Only the names are in memory, in one array: a million of them
take 60 MB, which forked workers share.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from halfstep.recipe import ConfigError, data_path

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
VALIDATED = 10  # without val, one image in so many


@dataclass(frozen=True)
class Images:
    """The images of a folder with their classes."""

    folder: Path
    names: NDArray[np.bytes_]  # (N,) within the folder
    labels: NDArray[np.int64]  # (N,)
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Image.Image:
        """Return an image in RGB. Raises ValueError, with its path, if it is broken."""
        path = self.folder / os.fsdecode(bytes(self.names[index]))
        _follow(path)
        try:
            with Image.open(path) as opened:
                return opened.convert("RGB")
        except Exception as error:  # formats are read by plugins, which raise errors of their own
            raise ValueError(f"{path} cannot be read as an image: {error}") from error

    def only(self, chosen: NDArray[np.bool_]) -> "Images":
        """Return the images selected by a mask (N,)."""
        return Images(self.folder, self.names[chosen], self.labels[chosen], self.classes)


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Transformed images and their labels."""

    def __init__(self, images: Images, transform: Callable[[Image.Image], Any]) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._images.read(index)), int(self._images.labels[index])


def find(folder: Path) -> tuple[Images, Images]:
    """Return a folder's training and validation images. Raises ConfigError with its path."""
    if (folder / "train").is_dir() and (folder / "val").is_dir():
        train, val = _images(folder / "train"), _images(folder / "val")
        if train.classes != val.classes:
            differing = ", ".join(sorted(set(train.classes) ^ set(val.classes)))
            raise ConfigError(
                f"recipe.folder is {str(folder)!r}: train/ and val/ must have the same classes; "
                f"only one of them has {differing}"
            )
        return train, val
    images = _images(folder)
    validates = np.zeros(len(images), bool)
    for label, name in enumerate(images.classes):
        [of_class] = np.nonzero(images.labels == label)
        if len(of_class) == 1:
            raise ConfigError(
                f"recipe.folder is {str(folder)!r}: the class {name} has only one image; training "
                "and validation need at least 2"
            )
        validates[of_class[VALIDATED // 2 :: VALIDATED]] = True
        validates[of_class[-1]] |= not validates[of_class].any()
    return images.only(~validates), images.only(validates)


def _images(folder: Path) -> Images:
    classes = tuple(sorted(_folders(folder)))
    if len(classes) < 2:
        raise ConfigError(
            f"recipe.folder is {str(folder)!r}: it has {len(classes) or 'no'} class folders; "
            "it needs at least two, each with its images"
        )
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        paths = sorted(_files(folder, name))
        if not paths:
            raise ConfigError(
                f"recipe.folder is {str(folder)!r}: the class {name} has no images; file names "
                f"must end in {', '.join(SUFFIXES)}"
            )
        names += paths
        labels += [label] * len(paths)
    return Images(folder, np.array(names), np.array(labels, np.int64), classes)


def _folders(folder: Path) -> Iterable[str]:
    _follow(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"recipe.folder is {str(folder)!r}: this folder does not exist on this worker"
        )
    with os.scandir(folder) as entries:
        return [
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        ]


def _files(folder: Path, name: str) -> Iterable[bytes]:
    for place, _, files in os.walk(folder / name, followlinks=True):
        _follow(Path(place))
        within = os.path.relpath(place, folder)
        yield from (
            os.fsencode(f"{within}/{file}")
            for file in files
            if file.lower().endswith(SUFFIXES) and not file.startswith(".")
        )


def _follow(path: Path) -> None:
    """Raise ConfigError for a link to a path that runs may not read."""
    if path.is_symlink():
        data_path(path, "recipe.folder")
