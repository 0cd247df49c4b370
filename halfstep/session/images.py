"""Conversion of images and batches of them to 8-bit pixels and PNG."""

import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.number_formats import number


def pixels(array: NDArray[Any], *, is_spread: bool = True) -> NDArray[np.uint8]:
    """Convert an image to 8-bit pixels, channels last, and a batch to a grid of its images.

    A batch has the shape (N, C, H, W) or (N, H, W, C).  is_spread: floats may also be in 0 … 1 or
    −1 … 1.  Raises ValueError for numbers in none of the ranges.
    """
    array = _channels_last(array)
    if array.ndim == 4:
        array = _grid(array)
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype == np.uint16:
        return np.rint(array / 257).astype(np.uint8)
    if array.dtype == np.uint8:
        return np.asarray(array, np.uint8)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"an image is of {array.dtype}; allowed: integers, floats and bool")
    return _scale(array, is_spread=is_spread and array.dtype.kind == "f")


def _channels_last(array: NDArray[np.generic]) -> NDArray[Any]:
    """Return an image or a batch as (…, H, W, C), with channels first or last."""
    channels = (1, 3, 4)
    is_first = array.ndim in (3, 4) and array.shape[-3] in channels
    is_last = array.ndim in (3, 4) and array.shape[-1] in channels
    return np.moveaxis(array, -3, -1) if is_first and not is_last else array


def _grid(images: NDArray[np.generic]) -> NDArray[Any]:
    """Arrange a batch (N, H, W, C) as one image, row by row, 2 pixels apart."""
    count, height, width, channels = images.shape
    if not count:
        raise ValueError(f"a batch of images has shape {images.shape}; allowed: 1 image or more")
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    shape = (rows * (height + 2) - 2, columns * (width + 2) - 2, channels)
    grid = np.full(shape, images.min() if images.dtype.kind == "f" else 0, images.dtype)
    for place, image in enumerate(images):
        y, x = place // columns * (height + 2), place % columns * (width + 2)
        grid[y : y + height, x : x + width] = image
    return grid


def _scale(array: NDArray[np.generic], *, is_spread: bool) -> NDArray[np.uint8]:
    """Scale numbers from their range to 0 … 255; nonfinite ones go to the range's ends."""
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    ends = _ends(low, high, is_spread=is_spread)
    if ends is None:
        allowed = "0 … 1, -1 … 1 or 0 … 255" if is_spread else "0 … 255"
        raise ValueError(
            f"an image has values from {number(low)} to {number(high)}; allowed: {allowed}"
        )
    first, last = ends
    numbers = np.nan_to_num(array.astype(np.float64), nan=first, posinf=last, neginf=first)
    scaled = (numbers - first) / (last - first) * 255
    return np.asarray(np.rint(scaled.clip(0, 255)), np.uint8)  # at most half a grey is cut


def _ends(low: float, high: float, *, is_spread: bool) -> tuple[float, float] | None:
    """Return the values that map to 0 and 255, or None if the numbers are in no range.

    Floats up to 2 do not count as 0 … 255, but as 0 … 1 with an overshoot.
    """
    margin = 0.5 / 255  # for rounding
    if is_spread and high <= 1 + margin:
        if low >= -margin:
            return 0.0, 1.0
        return (-1.0, 1.0) if low >= -1 - margin else None
    is_bytes = low >= -0.5 and high <= 255.5 and (high > 2 or not is_spread)
    return (0.0, 255.0) if is_bytes else None


def picture(image: Any) -> Any:
    """Convert a Pillow image to a mode that browsers show, if it is in another one."""
    if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        return image
    import PIL.Image

    if image.mode.startswith("I") or image.mode == "F":
        return PIL.Image.fromarray(pixels(_numbers(image)))
    if image.mode == "LAB":
        from PIL import ImageCms

        lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.applyTransform(image, ImageCms.buildTransform(lab, rgb, "LAB", "RGB"))
    return image.convert({"PA": "RGBA", "RGBa": "RGBA", "La": "LA"}.get(image.mode, "RGB"))


def _numbers(image: object) -> NDArray[np.generic]:
    """Return an image's grey values, those of 32-bit integers above 255 as 16-bit ones."""
    numbers = np.asarray(image)
    if numbers.dtype.kind == "i" and numbers.size and numbers.min() >= 0:
        is_16_bit = 255 < numbers.max() < 2**16
        return numbers.astype(np.uint16) if is_16_bit else numbers
    return numbers.astype(np.uint16) if numbers.dtype.kind == "u" else numbers


def png(image: NDArray[np.uint8]) -> bytes:
    """Encode an image (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) as PNG, 8 bits per channel."""
    colours = {(2, 1): 0, (3, 1): 0, (3, 3): 2, (3, 4): 6}
    channels = image.shape[2] if image.ndim == 3 else 1
    if (image.ndim, channels) not in colours:
        raise TypeError(f"an image has shape {image.shape}; allowed: (H, W), (H, W, 3), (H, W, 4)")
    height, width = image.shape[:2]
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # byte 0 is the filter: none
    lines[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, colours[image.ndim, channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
