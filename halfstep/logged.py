"""What a person logs, by its kind: numbers become metrics, all else files to be looked at."""

import csv
import io
import numbers
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_number(value: Any) -> bool:
    """Tell whether a value is one number, wherever it lies: on the host, or on a device."""
    return isinstance(value, numbers.Real) or (
        getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    )


def as_file(value: Any) -> tuple[str, bytes]:
    """Return the suffix and bytes of what shows this value.

    A text; an image, as a picture of Pillow or uint8 of shape (H, W), (H, W, 3) or (H, W, 4); a
    table, as a list of dictionaries or something with `to_csv`. Raises TypeError for others.
    """
    if isinstance(value, str):
        return "txt", value.encode()
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return "csv", _csv(value)
    if hasattr(value, "to_csv"):  # pandas
        return "csv", str(value.to_csv(index=False)).encode()
    if hasattr(value, "save") and hasattr(value, "mode"):  # Pillow
        file = io.BytesIO()
        value.save(file, format="PNG")
        return "png", file.getvalue()
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return "png", _png(value)
    allowed = "a number, a text, a picture, an array of uint8, or a list of dictionaries"
    raise TypeError(f"a {type(value).__name__} cannot be logged; allowed: {allowed}")


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image of 8 bits a channel: (H, W), (H, W, 3) or (H, W, 4)."""
    colours = {(2, 1): 0, (3, 1): 0, (3, 3): 2, (3, 4): 6}
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if (pixels.ndim, channels) not in colours:
        raise TypeError(f"an image has shape {pixels.shape}; allowed: (H, W), (H, W, 3), (H, W, 4)")
    height, width = pixels.shape[:2]
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, colours[pixels.ndim, channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
