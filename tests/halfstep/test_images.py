"""Images of every range, mode and layout look alike, or are reported in a line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import halfstep
from halfstep.wandb_compat.media import Image as CompatImage
from tests.halfstep.watching.watch_made import Written

GREY = np.linspace(0, 1, 30).reshape(5, 6)
BYTES = np.rint(GREY * 255).astype(np.uint8)
COLOUR = np.stack([BYTES, BYTES[::-1], BYTES.T.reshape(5, 6)], 2)


def open_shown(folder: Path, value: Any) -> Any:
    """Return the image that a browser shows for a logged value, decoded by Pillow."""
    with halfstep.watch(folder=folder, name="it", mode="offline") as watch:
        watch.log({"image": value})
    [event] = Written(folder / "it").of("artifact")
    return Image.open(folder / "it" / event["path"])


RANGES = {
    "0 to 1": GREY,
    "0 to 1, float16": GREY.astype(np.float16),
    "-1 to 1": GREY * 2 - 1,
    "0 to 255": GREY * 255,
    "rounded": GREY * 1.001,
    "int64": BYTES.astype(np.int64),
    "uint16": (BYTES.astype(np.uint16) * 257),
    "tensor": torch.tensor(GREY * 2 - 1, dtype=torch.bfloat16),
    "channel first": torch.tensor(GREY)[None],
    "I;16": Image.fromarray(BYTES.astype(np.uint16) * 257),
    "I": Image.fromarray(BYTES.astype(np.int32)),
    "I, 16 bits": Image.fromarray(BYTES.astype(np.int32) * 257),
    "F": Image.fromarray(GREY.astype(np.float32)),
    "F, 0 to 255": Image.fromarray((GREY * 255).astype(np.float32)),
}


@pytest.mark.parametrize("kind", RANGES)
def test_numbers_are_scaled_by_their_range(tmp_path: Path, kind: str) -> None:
    """Numbers in any range give the same image, also by the drop-in."""
    for value in (RANGES[kind], CompatImage(RANGES[kind]).to_loggable()):
        found = np.asarray(open_shown(tmp_path / str(id(value)), value).convert("L")).astype(int)
        assert np.abs(found - BYTES).max() <= (1 if kind != "tensor" else 2)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "P", "RGBX"])
def test_pictures_of_any_mode_are_converted(tmp_path: Path, mode: str) -> None:
    """Images of any mode are converted with the closest colours."""
    flat = Image.new("RGB", (4, 3), (204, 102, 51))
    if mode == "LAB":
        picture = Image.new("LAB", (4, 3), (140, 165, 174))  # what that colour is in CIELAB
    else:
        picture = flat.convert("RGB").convert(mode)
    found = np.asarray(open_shown(tmp_path, picture).convert("RGB")).astype(int)
    assert np.abs(found - np.asarray(flat)).max() <= 30


def test_transparency_is_kept(tmp_path: Path) -> None:
    """Images and arrays keep their alpha channel."""
    grey = Image.new("LA", (4, 3), (10, 77))
    assert np.asarray(open_shown(tmp_path / "a", grey))[..., -1].tolist() == [[77] * 4] * 3
    array = np.dstack([COLOUR, np.full((5, 6), 77, np.uint8)])
    for number, value in enumerate((array, Image.fromarray(array), np.moveaxis(array, 2, 0))):
        found = open_shown(tmp_path / str(number), value)
        assert found.mode == "RGBA"
        assert np.array_equal(np.asarray(found), array)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "grey"])
def test_a_batch_is_a_grid(tmp_path: Path, layout: str) -> None:
    """A batch is a grid of rows from the left, with one range for all images."""
    batch = np.stack([np.full((5, 6, 3), number * 60, np.uint8) for number in range(5)])
    value: Any = np.moveaxis(batch, 3, 1) if layout == "NCHW" else batch
    value = batch[:, None, :, :, 0] if layout == "grey" else value
    for number, each in enumerate((value, torch.tensor(value / 255))):
        found = np.asarray(open_shown(tmp_path / str(number), each).convert("L"))
        assert found.shape == (2 * 7 - 2, 3 * 8 - 2)
        assert (found[0, 0], found[0, 8], found[0, 16], found[7, 0], found[7, 8]) == (
            0,
            60,
            120,
            180,
            240,
        )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (GREY * 1000, "values from 0 to 1,000; allowed: 0 … 1, -1 … 1 or 0 … 255"),
        (GREY * 1.5, "values from 0 to 1.5"),
        (GREY * 3 - 2, "values from -2 to 1"),
        (BYTES.astype(np.int64) * 2, "values from 0 to 510; allowed: 0 … 255"),
        (BYTES.astype(np.int64) - 9, "values from -9 to 246"),
        (GREY.astype(complex), "an image is of complex128"),
        (np.zeros((0, 3, 4, 4)), "a batch of images has shape"),
    ],
)
def test_numbers_out_of_range_are_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any, words: str
) -> None:
    """Numbers out of range are rejected in one line, and not clipped."""
    with halfstep.watch(folder=tmp_path, name="it", mode="offline") as watch:
        watch.log({"image": value})
    assert Written(tmp_path / "it").of("artifact") == []
    assert words in capsys.readouterr().err
