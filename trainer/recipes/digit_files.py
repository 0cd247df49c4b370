"""The handwritten digits as PNG files in class folders, written once per user.

<cache>/halfstep/digits/{train,val}/<digit>/<number>.png      8 × 8 pixels, grey
"""

import os
import tempfile
from pathlib import Path

import torch
from PIL import Image

from halfstep.recipe import ConfigError
from trainer.recipes.handwritten import PIXEL_MAX, TRAIN_SIZE, load_digits


def digit_folder() -> Path:
    """Return the folder of the digits, written on first use. Raises ConfigError if it cannot be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = cache / "halfstep/digits"
    if not folder.is_dir():
        try:
            _publish(folder)
        except OSError as error:
            raise ConfigError(
                f"recipe.folder is empty, and the digits cannot be written to {folder}: {error}; "
                "name a folder, or set XDG_CACHE_HOME for the worker"
            ) from error
    return folder


def write_digits(folder: Path) -> None:
    """Write each of the 1797 digits to a file of its own."""
    images, labels = load_digits()
    pixels = (images * (255 / PIXEL_MAX)).round().to(torch.uint8).view(-1, 8, 8).numpy()
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        place = folder / ("train" if number < TRAIN_SIZE else "val") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:04}.png")


def _publish(folder: Path) -> None:
    """Create the folder atomically, also if other processes do so at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="digits-") as written:
        write_digits(whole := Path(written) / "digits")
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same files
                raise
